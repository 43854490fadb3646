//! Lifecycle hooks on a real runtime, observed by the timestamps of containers and commands, and by an HTTP server.

use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Write as _;
use std::net::TcpListener;
use std::sync::mpsc;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::processes_with;
use serde_json::Value;
use serde_json::json;

/// A server that answers every request, and the heads of the requests.
fn http_server() -> Result<(u16, mpsc::Receiver<String>)> {
    let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
    let port = listener.local_addr()?.port();
    let (sender, requests) = mpsc::channel();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let _ = stream.write_all(b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno");
            if sender.send(head.join("\n")).is_err() {
                return;
            }
        }
    });
    Ok((port, requests))
}

/// A command that writes timestamps and runs for this time.
fn command(node: &StandaloneNode, stamp: &str, milliseconds: u32, code: u8) -> Value {
    let (time, code) = (milliseconds.to_string(), code.to_string());
    json!({"exec": {"command": ["/probe", "exit", "--after-ms", time, "--code", code, "--stamp", node.stamp(stamp)]}})
}

/// The manifest of a pod whose containers have these names and hooks, each with timestamps under its name.
fn pod(node: &StandaloneNode, name: &str, grace: u32, containers: &[(&str, Value)]) -> Value {
    let mut pod = node.pod(name, &[]);
    let template = pod["spec"]["containers"][0].clone();
    let container = |(name, hooks): &(&str, Value)| {
        let mut container = template.clone();
        container["name"] = json!(name);
        container["command"] = json!(["/probe", "run", "--stamp", node.stamp(name)]);
        container["lifecycle"] = hooks.clone();
        container
    };
    pod["spec"]["containers"] = containers.iter().map(container).collect();
    pod["spec"]["terminationGracePeriodSeconds"] = json!(grace);
    pod
}

/// Nanoseconds of the first timestamp of this kind.
fn first(node: &StandaloneNode, name: &str, kind: &str) -> Result<u64> {
    let stamps = node.stamps_of(name);
    let found = stamps.iter().find(|(word, _)| word == kind).map(|(_, at)| *at);
    found.with_context(|| format!("{name} has no timestamp {kind}: {stamps:?}"))
}

fn is_gone(node: &mut StandaloneNode, pod: &str) -> Result<bool> {
    Ok(node.sandboxes(pod)?.iter().all(|sandbox| sandbox.containers.iter().all(|one| one.state != "running")))
}

#[test]
#[ignore = "real runtime"]
fn hooks_run_after_the_start_and_before_the_stop_of_their_container() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let (port, requests) = http_server()?;
    let headers = json!([{"name": "X-Asked-By", "value": "a hook"}]);
    let get =
        |path: &str| json!({"httpGet": {"host": "127.0.0.1", "port": port, "path": path, "httpHeaders": headers}});
    let by_command = json!({"postStart": command(&node, "post", 800, 0), "preStop": command(&node, "pre", 1500, 0)});
    let by_http = json!({"postStart": get("/started?a=1"), "preStop": get("/stopping")});
    let by_sleep = json!({"postStart": {"sleep": {"seconds": 1}}, "preStop": {"sleep": {"seconds": 3}}});
    let containers = [("a", by_command), ("b", by_http), ("c", by_sleep), ("d", json!({}))];
    node.layout.write_manifest("hooked", &pod(&node, "hooked", 30, &containers))?;
    node.start()?;
    node.until_true("the last container's timestamp", |node| Ok(node.starts("d") == 1))?;
    let [started, hooked, next] =
        [first(&node, "a", "start")?, first(&node, "post", "exit")?, first(&node, "b", "start")?];
    ensure!(started < hooked && hooked < next, "a at {started}, its hook until {hooked}, b at {next}");
    let [sleeping, last] = [first(&node, "c", "start")?, first(&node, "d", "start")?];
    // The program starts some time after the runtime's answer that the sleep follows.
    ensure!(last.saturating_sub(sleeping) > 800_000_000, "c at {sleeping}, d at {last}");
    let request = requests.recv_timeout(Duration::from_secs(5)).context("no request of postStart")?;
    ensure!(request.starts_with("GET /started?a=1 HTTP/1.1\n") && request.contains("kube-lifecycle/1."), "{request}");
    ensure!(request.lines().any(|line| line == "X-Asked-By: a hook"), "{request}");

    node.layout.remove_manifest("hooked")?;
    node.until_true("all containers exited", |node| is_gone(node, "hooked"))?;
    let request = requests.recv_timeout(Duration::from_secs(5)).context("no request of preStop")?;
    ensure!(request.starts_with("GET /stopping HTTP/1.1\n"), "{request}");
    let [begun, done, stopped] =
        [first(&node, "pre", "start")?, first(&node, "pre", "exit")?, first(&node, "a", "exit")?];
    ensure!(begun < done && done < stopped, "the hook ran from {begun} to {done}, a exited at {stopped}");
    let [at_once, slept] = [first(&node, "d", "exit")?, first(&node, "c", "exit")?];
    ensure!(slept.saturating_sub(at_once) > 2_500_000_000, "d exited at {at_once}, c at {slept}");
    for reason in ["FailedPostStartHook", "FailedPreStopHook"] {
        ensure!(!node.log_contains(&[reason]), "{reason}");
    }
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn failing_and_hanging_hooks_are_reported_and_bounded() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let failing = json!({"postStart": command(&node, "fails", 0, 3), "preStop": command(&node, "flush", 0, 0)});
    node.layout.write_manifest("broken", &pod(&node, "broken", 10, &[("broken", failing)]))?;
    let hanging = json!({"preStop": {"exec": {"command": ["/probe", "run", "--stamp", node.stamp("hangs")]}}});
    node.layout.write_manifest("stuck", &pod(&node, "stuck", 3, &[("stuck", hanging)]))?;
    node.start()?;
    node.until_true("the failing hook ran twice", |node| Ok(node.starts("fails") >= 2))?;
    ensure!(node.starts("flush") >= 1, "preStop of a container whose postStart failed did not run");
    let waiting = node.until("the reason that it waits", |node| {
        let state = node.status("broken")["containerStatuses"][0]["state"]["waiting"].clone();
        Ok(state.is_object().then_some(state))
    })?;
    let reason = waiting["reason"].as_str().unwrap_or_default();
    ensure!(["PostStartHookError", "CrashLoopBackOff"].contains(&reason), "{waiting}");
    let message = r#"Exec lifecycle hook ([/probe exit --after-ms 0 --code 3"#;
    ensure!(node.log_contains(&[message, "exited with 3"]), "no message of the failed hook");
    ensure!(node.log_contains(&["FailedPostStartHook", "PostStartHook failed"]), "no event");

    node.until_running("stuck")?;
    let since = Instant::now();
    node.layout.remove_manifest("stuck")?;
    node.until_true("the hanging pod is stopped", |node| is_gone(node, "stuck"))?;
    ensure!(node.starts("hangs") == 1, "the hook did not run");
    ensure!(since.elapsed() >= Duration::from_secs(3), "stopped after {:?}", since.elapsed());
    ensure!(since.elapsed() < Duration::from_secs(20), "stopped after {:?}", since.elapsed());
    node.until_true("the event of the hook that ended with its container", |node| {
        Ok(node.log_contains(&["FailedPreStopHook", "stuck"]))
    })?;
    node.stop()
}

/// How long the processes run that hooks leave behind: arguments by which they are found.
const LEFT: [&str; 2] = ["36011", "36012"];

/// The process of postStart lets its hook end; that of preStop keeps the output of its hook open.
#[test]
#[ignore = "real runtime"]
fn processes_that_hooks_leave_behind_hold_up_no_stop_and_end_with_their_container() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let forking = |stamp: &str, seconds: &str, output: &str| {
        let script = format!("echo start 1 >> {}; sleep {seconds} {output} & exit 0", node.stamp(stamp));
        json!({"exec": {"command": ["sh", "-c", script]}})
    };
    let hooks = json!({
        "postStart": forking("post", LEFT[0], "> /dev/null 2>&1"), "preStop": forking("pre", LEFT[1], ""),
    });
    let mut forks = pod(&node, "forks", 3, &[("forks", hooks)]);
    let container = &mut forks["spec"]["containers"][0];
    container["image"] = json!(BUSYBOX_IMAGE);
    let script = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done";
    container["command"] = json!(["sh", "-c", script]);
    node.layout.write_manifest("forks", &forks)?;
    node.write_running_pod("other")?;
    node.start()?;
    let is_ready = |node: &mut StandaloneNode| Ok(node.status("forks")["containerStatuses"][0]["ready"] == true);
    node.until_true("the container is ready", is_ready)?;
    node.until_true("postStart ran", |node| Ok(node.starts("post") == 1))?;
    node.until_true("the process of postStart", |_| Ok(processes_with(LEFT[0]).len() == 1))?;

    let since = Instant::now();
    node.layout.remove_manifest("forks")?;
    node.until_true("the pod is stopped", |node| is_gone(node, "forks"))?;
    ensure!(since.elapsed() < Duration::from_secs(20), "stopped after {:?}", since.elapsed());
    ensure!(node.starts("pre") == 1, "preStop did not run");
    node.until_true("no process of a hook", |_| Ok(LEFT.iter().all(|word| processes_with(word).is_empty())))?;
    node.until_running("other")?;
    ensure!(node.starts("other") == 1, "another pod was restarted");
    node.stop()
}
