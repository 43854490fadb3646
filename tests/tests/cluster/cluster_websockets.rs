//! WebSocket streams that the API server passes through to the node: the node declares the feature, kubectl and API
//! server use it, and the results are the same.

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt as _;
use k8s_openapi::api::core::v1::Node;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::Kubectl;
use keblet_tests::cluster::Session;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use kube::Api;
use serde_json::Value;
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::http::HeaderValue;

use crate::cluster_streams::copy_there_and_back;
use crate::cluster_streams::on_a_terminal;

const FEATURE: &str = "ExtendWebSocketsToKubelet";
/// Permitted growth of an agent with clients that do not read.
const GROWTH_KIB: u64 = 24 << 10;

/// A node of its own, so that the test counts only its own sessions.
async fn new_namespace(name: &str, changes: Value) -> Tenant {
    let cluster = Cluster::shared().await.unwrap();
    let node = Arc::new(ClusterNode::start(&cluster, changes).await.unwrap());
    let tenant = Tenant::on(cluster, node, name).await.unwrap();
    tenant.pod("shell", tenant.shell("sleep 3600")).await.unwrap();
    tenant.until_ready("shell").await.unwrap();
    tenant
}

async fn delete_namespace(tenant: Tenant) {
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}

/// Number of WebSocket sessions of the node: exec, attach, port-forward.
async fn streaming_requests(tenant: &Tenant) -> [u64; 3] {
    let path = format!("/api/v1/nodes/{}/proxy/metrics", tenant.node.name());
    let metrics = tenant.kubectl().ok(&["get", "--raw", &path]).await.unwrap();
    ["exec", "attach", "portforward"].map(|subresource| {
        let name = format!("kubelet_websocket_streaming_requests_total{{subresource=\"{subresource}\"}} ");
        metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap_or(0)
    })
}

/// Exec sessions in progress. There is no event when one has ended.
async fn in_flight(tenant: &Tenant) -> u64 {
    let path = format!("/api/v1/nodes/{}/proxy/metrics", tenant.node.name());
    let metrics = tenant.kubectl().ok(&["get", "--raw", &path]).await.unwrap();
    let lines = metrics.lines().filter(|line| line.starts_with("kubelet_http_inflight_requests{"));
    let exec = lines.filter(|line| line.contains("path=\"exec\""));
    exec.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

async fn declared_features(tenant: &Tenant) -> Option<Vec<String>> {
    let node = Api::<Node>::all(tenant.cluster.client()).get(tenant.node.name()).await.unwrap();
    node.status.unwrap().declared_features
}

#[tokio::test]
#[ignore = "real cluster"]
async fn exec_uses_websockets_to_the_node() {
    let tenant = new_namespace("websocket-exec", json!({})).await;
    assert!(declared_features(&tenant).await.unwrap().iter().any(|one| one == FEATURE));
    let kubectl = tenant.kubectl();
    let mut sessions = 0;
    let mut exec = async |options: &[&str], script: &str, input: &str| {
        sessions += 1;
        let arguments = [&["exec"], options, &["shell", "--", "sh", "-c", script]].concat();
        kubectl.run_with(&arguments, input).await.unwrap()
    };
    let output = exec(&[], "echo out; echo err >&2; exit 42", "").await;
    assert_eq!((output.code, output.out.as_str()), (42, "out\n"));
    assert!(output.err.starts_with("err\n") && output.err.contains("exit code 42"), "{output:?}");
    let output = exec(&["-i"], "cat; echo over; exit 7", "input\n").await;
    assert_eq!(
        (output.code, output.out.as_str()),
        (7, "input\nover\n"),
        "the end of the input is passed on: {output:?}"
    );
    let much: String = std::iter::repeat_with(fastrand::alphanumeric).take(8 << 20).collect();
    let output = exec(&["-i"], "tee /tmp/much", &much).await;
    assert!(output.code == 0 && output.out == much, "{}: {} bytes of {}", output.code, output.out.len(), much.len());
    let output = exec(&["-i"], "md5sum </tmp/much; md5sum", &much).await;
    let sums: Vec<&str> = output.out.lines().collect();
    assert!(sums.len() == 2 && sums[0] == sums[1], "{output:?}");
    // Little input: containerd hangs now and then when a command exits before it has read all of its input.
    let output = exec(&["-i"], "echo enough; exit 9", "untaken\n").await;
    assert_eq!(
        (output.code, output.out.as_str()),
        (9, "enough\n"),
        "a command that exits before the end of its input: {}",
        output.err
    );
    let output = kubectl.run(&["exec", "shell", "--", "no-such-program"]).await.unwrap();
    assert!(output.code != 0 && output.err.contains("no-such-program"), "{output:?}");
    assert_eq!(streaming_requests(&tenant).await, [sessions + 1, 0, 0]);

    on_a_terminal(&kubectl, "shell").await;
    copy_there_and_back(&kubectl, "shell", 16 << 20).await;
    // A terminal session, two copies, and a `stat` of the destination of one of them.
    let sessions = sessions + 1 + 1 + 2 + 1;
    assert_eq!(streaming_requests(&tenant).await, [sessions, 0, 0]);

    let old = tenant.kubectl().without_websockets();
    let output = old.run_with(&["exec", "-i", "shell", "--", "sh", "-c", "cat; exit 3"], "input\n").await.unwrap();
    assert_eq!((output.code, output.out.as_str()), (3, "input\n"), "{output:?}");
    assert_eq!(streaming_requests(&tenant).await, [sessions, 0, 0], "SPDY streams of older clients are not translated");
    delete_namespace(tenant).await;
}

#[tokio::test]
#[ignore = "real cluster"]
async fn attach_uses_websockets_to_the_node() {
    let tenant = new_namespace("websocket-attach", json!({})).await;
    let mut pod = tenant.shell("while read line; do echo heard $line; echo error >&2; done; echo end of input");
    pod["restartPolicy"] = json!("Never");
    pod["containers"][0]["stdin"] = json!(true);
    pod["containers"][0]["stdinOnce"] = json!(true);
    tenant.pod("listener", pod.clone()).await.unwrap();
    tenant.until_ready("listener").await.unwrap();
    let mut session = tenant.kubectl().start(&["attach", "-i", "listener"]).unwrap();
    session.send_until_output("you\n", "heard you").await.unwrap();
    session.until_output("error").await.unwrap();
    session.close_input();
    tenant.until_phase("listener", "Succeeded").await.unwrap();
    let (_, output) = session.ended().await.unwrap();
    assert!(output.contains("end of input"), "{output}");
    assert_eq!(streaming_requests(&tenant).await, [0, 1, 0]);

    // The container has a terminal, the client none: it requests streams that the runtime does not serve.
    pod["containers"][0]["tty"] = json!(true);
    tenant.pod("terminal", pod).await.unwrap();
    tenant.until_ready("terminal").await.unwrap();
    let mut session = tenant.kubectl().start(&["attach", "-i", "terminal"]).unwrap();
    session.send_until_output("you\n", "heard you").await.unwrap();
    drop(session);
    let mut session = tenant.kubectl().start_on_terminal(&["attach", "-it", "terminal"]).unwrap();
    session.send_until_output("again\n", "heard again").await.unwrap();
    session.send("\u{4}").await.unwrap();
    tenant.until_phase("terminal", "Succeeded").await.unwrap();
    let (_, output) = session.ended().await.unwrap();
    assert!(output.contains("end of input"), "{output}");
    assert_eq!(streaming_requests(&tenant).await, [0, 3, 0]);
    delete_namespace(tenant).await;
}

/// The local ports that are forwarded to the pod's.
async fn forward(kubectl: &Kubectl, ports: &[u16]) -> (Session, Vec<u16>) {
    let named: Vec<String> = ports.iter().map(|port| format!(":{port}")).collect();
    let arguments = ["port-forward", "pod/echo"].into_iter().chain(named.iter().map(String::as_str));
    let mut session = kubectl.start(&arguments.collect::<Vec<_>>()).unwrap();
    let mut local = Vec::new();
    for port in ports {
        let output = session.until_output(&format!("-> {port}\n")).await.unwrap();
        let line = output
            .lines()
            .find(|line| line.starts_with("Forwarding from 127.0.0.1:") && line.ends_with(&port.to_string()));
        local.push(line.unwrap().split([':', ' ']).nth(3).unwrap().parse().unwrap());
    }
    (session, local)
}

/// Sends this many bytes to a port that echoes them.
async fn echo(port: u16, length: usize) {
    let all: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(length).collect();
    let mut returned = vec![0; length];
    let talk = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (mut read, mut write) = stream.split();
        let (sent, got) = tokio::join!(write.write_all(&all), read.read_exact(&mut returned));
        sent.and(got.map(|_| ())).unwrap();
    };
    timeout(TIMEOUT, talk).await.expect("in time");
    assert!(returned == all, "{length} bytes were changed");
}

#[tokio::test]
#[ignore = "real cluster"]
async fn port_forward_uses_websockets_to_the_node() {
    let tenant = new_namespace("websocket-ports", json!({})).await;
    let script = "nc -ll -p 9001 -e cat & nc -ll -p 9002 -e cat & sleep 3600";
    tenant.pod("echo", tenant.shell(script)).await.unwrap();
    for port in [9001, 9002] {
        tenant.until_listening("echo", port).await.unwrap();
    }
    for (kubectl, expected) in [(tenant.kubectl(), 1), (tenant.kubectl().without_websockets(), 1)] {
        let (session, local) = forward(&kubectl, &[9001, 9002, 9003]).await;
        let both = [local[0], local[1]];
        tokio::join!(echo(both[0], 8 << 20), echo(both[1], 8 << 20), echo(both[0], 1 << 20), echo(both[1], 1));
        assert_eq!(streaming_requests(&tenant).await, [0, 0, expected], "one session for all connections");
        // No process listens there; kubectl receives the error and exits.
        let mut refused = TcpStream::connect(("127.0.0.1", local[2])).await.unwrap();
        let ended = timeout(TIMEOUT, refused.read_to_end(&mut Vec::new())).await;
        assert!(ended.is_ok(), "{}", session.output_so_far());
        let (code, output) = session.ended().await.unwrap();
        assert!(code != 0 && output.contains("9003"), "{code}: {output}");
    }
    delete_namespace(tenant).await;
}

/// What a WebSocket client receives from `path` of the API server, which a proxy serves at `port`.
async fn read_websocket(port: u16, path: &str) -> String {
    let mut request = format!("ws://127.0.0.1:{port}{path}").into_client_request().unwrap();
    request.headers_mut().insert("Sec-WebSocket-Protocol", HeaderValue::from_static("binary.k8s.io"));
    let read = async {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (messages, _) = tokio_tungstenite::client_async(request, stream).await.unwrap();
        let data = messages.try_filter(|message| std::future::ready(message.is_binary()));
        let all = data.try_fold(Vec::new(), async |all, message| Ok([all, message.into_data().to_vec()].concat()));
        String::from_utf8(all.await.unwrap()).unwrap()
    };
    timeout(TIMEOUT, read).await.expect("the end of the stream")
}

/// The API server discards what it reads together with the end of a log.
#[tokio::test]
#[ignore = "real cluster"]
async fn logs_reach_websocket_clients_to_their_last_line() {
    let tenant = Tenant::new_namespace("websocket-logs").await.unwrap();
    for (name, script) in [("short", "echo only line"), ("long", "seq 1 20000")] {
        let mut pod = tenant.shell(script);
        pod["restartPolicy"] = json!("Never");
        tenant.pod(name, pod).await.unwrap();
    }
    let mut proxy = tenant.kubectl().start(&["proxy", "--port=0"]).unwrap();
    let output = proxy.until_output("\n").await.unwrap();
    let port = output.trim().rsplit(':').next().unwrap().parse().unwrap();
    let long: String = (1..=20000).map(|n| format!("{n}\n")).collect();
    for (name, expected) in [("short", "only line\n"), ("long", &long)] {
        tenant.until_phase(name, "Succeeded").await.unwrap();
        for attempt in 1..=10 {
            let path = format!("/api/v1/namespaces/{}/pods/{name}/log", tenant.namespace);
            let log = read_websocket(port, &path).await;
            assert!(log == expected, "attempt {attempt} of {name}: {} of {} bytes", log.len(), expected.len());
        }
    }
    drop(proxy);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn websocket_feature_can_be_disabled() {
    let gate = json!({ FEATURE: false });
    // Features that must be declared are not available without declared features.
    let all = json!({
        "NodeDeclaredFeatures": false,
        FEATURE: false,
        "InPlacePodLevelResourcesVerticalScaling": false,
        "InPlacePodVerticalScalingInitContainers": false,
        "RestartAllContainersOnContainerExits": false,
    });
    for (name, gates, declared) in [("no-websocket", gate, true), ("no-features", all, false)] {
        let tenant = new_namespace(name, json!({ "featureGates": gates })).await;
        let features = declared_features(&tenant).await;
        assert_eq!(features.is_some(), declared, "{features:?}");
        assert!(!features.unwrap_or_default().iter().any(|one| one == FEATURE));
        let command = ["exec", "-i", "shell", "--", "sh", "-c", "cat; exit 7"];
        let output = tenant.kubectl().run_with(&command, "input\n").await.unwrap();
        assert_eq!((output.code, output.out.as_str()), (7, "input\n"), "{output:?}");
        tenant.pod("echo", tenant.shell("nc -ll -p 9001 -e cat")).await.unwrap();
        tenant.until_listening("echo", 9001).await.unwrap();
        let (_session, local) = forward(&tenant.kubectl(), &[9001]).await;
        echo(local[0], 1 << 20).await;
        assert_eq!(streaming_requests(&tenant).await, [0; 3]);
        delete_namespace(tenant).await;
    }
}

/// Sessions end with their client; a runtime that exits is reported to the client.
#[tokio::test]
#[ignore = "real cluster"]
async fn session_ends_when_client_or_runtime_exits() {
    let tenant = new_namespace("websocket-ends", json!({})).await;
    let kubectl = tenant.kubectl();
    let script = "echo ready; cat; touch /tmp/over";
    let mut session = kubectl.start(&["exec", "-i", "shell", "--", "sh", "-c", script]).unwrap();
    session.until_output("ready").await.unwrap();
    drop(session);
    let over = "until test -e /tmp/over; do sleep 0.1; done";
    kubectl.ok(&["exec", "shell", "--", "sh", "-c", over]).await.unwrap();

    // The runtime's output is not read, so a closed connection is not noticed by writing.
    let mut session = kubectl.start(&["exec", "-i", "shell", "--", "sh", "-c", "echo ready; sleep 3600"]).unwrap();
    session.until_output("ready").await.unwrap();
    let flood = async { while session.send(&"more ".repeat(10_000)).await.is_ok() {} };
    assert!(timeout(Duration::from_secs(2), flood).await.is_err(), "the output was read");
    assert_eq!(in_flight(&tenant).await, 1);
    drop(session);
    let ended = async {
        while in_flight(&tenant).await > 0 {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    timeout(TIMEOUT, ended).await.expect("the session of a disconnected client ends");

    let mut session = kubectl.start(&["exec", "-i", "shell", "--", "sh", "-c", "echo ready; cat"]).unwrap();
    session.until_output("ready").await.unwrap();
    tenant.node.kill_runtime().unwrap();
    let output = session.until_output("Internal error occurred").await.unwrap();
    assert!(output.contains("the runtime"), "{output}");
    let (code, output) = session.ended().await.unwrap();
    assert_ne!(code, 0, "{output}");
    tenant.node.start_runtime().unwrap();
    tenant.node.until_ready(&tenant.cluster).await.unwrap();
    delete_namespace(tenant).await;
}

/// A number in kB of `/proc/PID/status`.
fn kib(pid: u32, field: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[tokio::test]
#[ignore = "real cluster"]
async fn stalled_clients_hold_bounded_memory_and_block_no_other_client() {
    let tenant = new_namespace("websocket-slow", json!({})).await;
    let kubectl = tenant.kubectl();
    kubectl.ok(&["exec", "shell", "--", "true"]).await.unwrap();
    let pid = tenant.node.agent_pid().unwrap();
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
    let before = kib(pid, "VmRSS");
    // Without input: its end would come after the process's exit, and a runtime that has closed the connection by then
    // discards unsent output.
    let mut slow: Vec<_> = (0..8)
        .map(|_| kubectl.start(&["exec", "shell", "--", "sh", "-c", "echo ready; seq 1 4000000"]).unwrap())
        .collect();
    for session in &mut slow {
        session.until_output("ready").await.unwrap();
        session.suspend().unwrap();
    }
    let output = kubectl.ok(&["exec", "shell", "--", "sh", "-c", "sleep 5; seq 1 100000"]).await.unwrap();
    assert_eq!(output.lines().count(), 100_000, "other clients are served");
    let peak = kib(pid, "VmHWM");
    println!("{before} KiB became {peak}");
    assert!(peak < before + GROWTH_KIB, "{before} KiB became {peak}");
    // Concurrently: kubectl closes a connection that it has not read for a minute.
    for session in &slow {
        session.resume().unwrap();
    }
    for session in slow {
        let (code, output) = session.ended().await.unwrap();
        assert!(
            code == 0 && output.ends_with("\n3999999\n4000000\n"),
            "{code}: {} bytes, {:?}",
            output.len(),
            output.get(output.len() - 300..)
        );
    }
    delete_namespace(tenant).await;
}
