//! Probes and hooks with hostile targets, commands and numbers: events and status have the reason, no other pod is
//! disturbed, and nothing is left of the pods.

use futures_util::future::join;
use futures_util::future::join_all;
use keblet_peers::PROBE_IMAGE;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use super::*;

/// What becomes of a pod.
enum Outcome {
    Ready,
    /// Its container runs and is not ready.
    Unready,
    /// Its container waits for the next try to start it.
    Waits,
    /// Its container is being stopped.
    Stopping,
}

/// A pod, what becomes of it, and an event: its reason, and what its message contains.
struct Row {
    pod: Value,
    outcome: Outcome,
    event: Option<(&'static str, &'static str)>,
}

impl Row {
    fn name(&self) -> &str {
        self.pod["metadata"]["name"].as_str().unwrap()
    }

    /// Waits for its outcome.
    async fn settles(&self, tenant: &Tenant) {
        let name = self.name();
        match self.outcome {
            Outcome::Ready => _ = tenant.until_ready(name).await.unwrap(),
            Outcome::Unready => tenant.until(name, "running and not ready", is_unready).await.unwrap(),
            Outcome::Waits => tenant.until(name, "waiting with a reason", waits).await.unwrap(),
            Outcome::Stopping => {}
        }
    }

    /// Waits for its event.
    async fn reports(&self, tenant: &Tenant) {
        if let Some((reason, text)) = self.event {
            until_event(tenant, self.name(), reason, text).await;
        }
    }
}

fn is_unready(pod: Option<&Pod>) -> Option<()> {
    let container = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?;
    container.state.as_ref()?.running.as_ref()?;
    (!container.ready && container.restart_count == 0).then_some(())
}

/// The container waits because its hook failed, with that as the message, or for its back-off afterwards.
fn waits(pod: Option<&Pod>) -> Option<()> {
    let container = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?;
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let message = waiting.message.as_deref()?;
    let is_explained = match waiting.reason.as_deref()? {
        "PostStartHookError" => message.contains(" lifecycle hook ("),
        "CrashLoopBackOff" => message.starts_with("back-off "),
        _ => false,
    };
    is_explained.then_some(())
}

/// A server on this machine, where the agent runs. Answers a request with `head`, then writes `again` for ever; without
/// either it keeps the connection open.
async fn server(head: &'static str, again: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                drop(stream.read(&mut [0; 4096]).await);
                drop(stream.write_all(head.as_bytes()).await);
                while !again.is_empty() && stream.write_all(again.as_bytes()).await.is_ok() {}
                // Until the client closes the connection.
                while stream.read_u8().await.is_ok() {}
            });
        }
    });
    port
}

/// A GET of port 9, where no pod listens, with `fields` over its own.
fn http_get(fields: Value) -> Value {
    let mut action = json!({ "path": "/", "port": 9 });
    action.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    json!({ "httpGet": action })
}

fn exec(command: &[&str]) -> Value {
    json!({ "exec": { "command": command } })
}

/// A probe or hook with more fields.
fn with(mut action: Value, fields: Value) -> Value {
    action.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    action
}

/// A name that no resolver looks up.
fn unknown_host() -> String {
    format!("{}.invalid", "h".repeat(64))
}

const UNKNOWN: &str = "Readiness probe errored and resulted in unknown state: ";

/// Pods whose readiness is probed at a hostile target.
async fn hostile_targets(tenant: &Tenant) -> Vec<Row> {
    let row = |name: &str, action: Value, outcome: Outcome, text: Option<&'static str>| {
        let pod = bound(tenant, name, json!({ "readinessProbe": action }), json!({}));
        Row { pod, outcome, event: text.map(|text| ("Unhealthy", text)) }
    };
    let unready = |name: &str, action: Value, text: &'static str| row(name, action, Outcome::Unready, Some(text));
    let of_server = |port: u16| http_get(json!({ "host": "127.0.0.1", "port": port }));
    let forged_path = json!({ "path": format!("/{FORGED}") });
    let elsewhere = json!({ "path": "https://user:secret@other.invalid:1/x" });
    let forged_header = json!({ "httpHeaders": [{ "name": "Host", "value": "a\r\nX-Forged: b" }] });
    let body = server("HTTP/1.1 200 OK\r\n\r\n", "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy").await;
    let headers = server("HTTP/1.1 200 OK\r\n", "X-Filler: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n").await;
    let silent = server("", "").await;
    let grpc = json!({ "grpc": { "port": 8080 } });
    let mut without_grpc = unready("grpc-where-none-is", grpc, "Readiness probe failed: ");
    let container = &mut without_grpc.pod["spec"]["containers"][0];
    (container["image"], container["command"]) = (json!(PROBE_IMAGE), json!(["/probe", "web"]));
    vec![
        unready("path-on-two-lines", http_get(forged_path), "/%0A2000-01-01T00:00:00.000000Z%20ERROR%20"),
        unready("path-of-another-server", http_get(elsewhere), ":9/x\": dial tcp "),
        unready("path-of-no-server", http_get(json!({ "path": "foo:bar" })), "Get \"http:bar\": http: no Host in "),
        unready(
            "host-with-a-port",
            http_get(json!({ "host": "127.0.0.1:1/x?" })),
            "errored and resulted in unknown state: parse \"http://[127.0.0.1:1",
        ),
        unready("host-that-is-unknown", http_get(json!({ "host": unknown_host() })), "Readiness probe failed: Get "),
        unready("header-on-two-lines", http_get(forged_header), "net/http: invalid header field value for \"Host\""),
        unready("port-of-no-container", http_get(json!({ "port": "nope" })), UNKNOWN),
        unready("command-that-is-missing", exec(&["/no/such/program"]), UNKNOWN),
        unready("output-without-end", exec(&["cat", "/dev/zero"]), "command timed out: \"cat /dev/zero\" timed out"),
        unready("headers-without-end", of_server(headers), "Readiness probe failed: Get \"http://127.0.0.1:"),
        unready("answers-never", of_server(silent), "(Client.Timeout exceeded while awaiting headers)"),
        row("body-without-end", of_server(body), Outcome::Ready, None),
        without_grpc,
    ]
}

/// Pods whose probes have the greatest numbers.
fn greatest_numbers(tenant: &Tenant) -> Vec<Row> {
    let greatest = json!({
        "initialDelaySeconds": i32::MAX,
        "periodSeconds": i32::MAX,
        "timeoutSeconds": i32::MAX,
        "failureThreshold": i32::MAX,
    });
    let of_stop = json!({ "periodSeconds": 1, "failureThreshold": 1, "terminationGracePeriodSeconds": i32::MAX });
    let never = with(exec(&["true"]), greatest.clone());
    let all = json!({
        "startupProbe": with(never.clone(), json!({ "terminationGracePeriodSeconds": i64::MAX })),
        "livenessProbe": with(never.clone(), json!({ "terminationGracePeriodSeconds": i64::MAX })),
        "readinessProbe": with(never, json!({ "successThreshold": i32::MAX })),
    });
    let killing = json!({ "livenessProbe": with(exec(&["false"]), of_stop) });
    let pod = |name: &str, fields: Value| bound(tenant, name, fields, json!({}));
    let killed = Some(("Killing", "Container main failed liveness probe, will be restarted"));
    let late = json!({ "livenessProbe": with(exec(&["false"]), greatest) });
    vec![
        Row { pod: pod("probed-never", all), outcome: Outcome::Unready, event: None },
        Row { pod: pod("killed-never", late), outcome: Outcome::Ready, event: None },
        Row { pod: pod("killed-slowly", killing), outcome: Outcome::Stopping, event: killed },
    ]
}

/// Pods whose postStart hook fails.
fn failing_starts(tenant: &Tenant) -> Vec<Row> {
    let failed = Some(("FailedPostStartHook", "PostStartHook failed"));
    let row = |(name, hook): (&str, Value)| {
        let pod = bound(tenant, name, json!({ "lifecycle": { "postStart": hook } }), json!({}));
        Row { pod, outcome: Outcome::Waits, event: failed }
    };
    let rows = [
        ("starts-a-missing-command", exec(&["/no/such/program"])),
        ("starts-at-a-port-of-no-container", http_get(json!({ "port": "nope" }))),
        ("starts-at-an-unknown-host", http_get(json!({ "host": unknown_host() }))),
        // Its message is longer than a pod may be.
        ("starts-at-a-huge-path", http_get(json!({ "path": " ".repeat(400_000) }))),
    ];
    rows.into_iter().map(row).collect()
}

/// Pods that run until their preStop hook does. The events follow their deletion.
fn hostile_stops(tenant: &Tenant) -> Vec<Row> {
    let row = |(name, hook, fails): (&str, Value, bool)| {
        // A hook may sleep as long as the pod's own grace period, which a deletion shortens.
        let grace = json!({ "terminationGracePeriodSeconds": 3600 });
        let pod = bound(tenant, name, json!({ "lifecycle": { "preStop": hook } }), grace);
        let event = fails.then_some(("FailedPreStopHook", "PreStopHook failed"));
        Row { pod, outcome: Outcome::Ready, event }
    };
    let rows = [
        ("stops-by-a-missing-command", exec(&["/no/such/program"]), true),
        ("stops-at-a-port-of-no-container", http_get(json!({ "port": "nope" })), true),
        ("stops-at-an-unknown-host", http_get(json!({ "host": unknown_host() })), true),
        ("stops-by-a-long-sleep", json!({ "sleep": { "seconds": 3600 } }), false),
        ("stops-by-a-daemon", exec(&["sh", "-c", "sleep 3600 & exit 0"]), false),
        ("stops-by-output-without-end", exec(&["cat", "/dev/zero"]), false),
    ];
    rows.into_iter().map(row).collect()
}

/// Pods that the API server rejects.
fn rejected(tenant: &Tenant) -> Vec<Value> {
    let rows = [
        json!({ "lifecycle": { "preStop": { "sleep": { "seconds": 2 } } } }),
        json!({ "lifecycle": { "postStart": http_get(json!({ "port": 0 })) } }),
        json!({ "livenessProbe": http_get(json!({ "scheme": "GOPHER" })) }),
        json!({ "livenessProbe": http_get(json!({ "httpHeaders": [{ "name": "a\r\nb", "value": "" }] })) }),
        json!({ "livenessProbe": with(exec(&["true"]), json!({ "terminationGracePeriodSeconds": 0 })) }),
        json!({ "readinessProbe": with(exec(&["true"]), json!({ "terminationGracePeriodSeconds": 1 })) }),
        json!({ "readinessProbe": with(exec(&["true"]), json!({ "periodSeconds": -1 })) }),
    ];
    rows.into_iter().enumerate().map(|(n, fields)| bound(tenant, &format!("r{n}"), fields, json!({}))).collect()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn malicious_probes_and_hooks_are_reported_and_leave_nothing() {
    let tenant = alone_on_a_node("actions").await;
    let pid = tenant.node.agent_pid().unwrap();
    tenant.pod("calm", tenant.shell("sleep 3600")).await.unwrap();
    let calm = tenant.until_ready("calm").await.unwrap();
    for pod in rejected(&tenant) {
        let text = pod["spec"]["containers"][0].to_string();
        assert!(tenant.create::<Pod>(pod).await.is_err(), "accepted: {text}");
    }
    let mut rows = hostile_targets(&tenant).await;
    rows.extend(greatest_numbers(&tenant));
    rows.extend(failing_starts(&tenant));
    let stops = hostile_stops(&tenant);
    for row in rows.iter().chain(&stops) {
        tenant.create::<Pod>(row.pod.clone()).await.unwrap();
    }
    let settled = rows.iter().chain(&stops).map(|row| row.settles(&tenant));
    join(join_all(settled), join_all(rows.iter().map(|row| row.reports(&tenant)))).await;
    leave_nothing(&tenant, &calm).await;
    join_all(stops.iter().map(|row| row.reports(&tenant))).await;
    assert_eq!(tenant.node.agent_pid().unwrap(), pid);
    assert_unforged(&tenant.node);
    leave(tenant).await;
}
