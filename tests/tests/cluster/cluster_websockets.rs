//! Streams that the API server leaves to the node as WebSockets: the node says that it speaks them, kubectl and API
//! server use it, and nothing differs but the counters.

use std::sync::Arc;
use std::time::Duration;

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

use crate::cluster_streams::copy_there_and_back;
use crate::cluster_streams::on_a_terminal;

const FEATURE: &str = "ExtendWebSocketsToKubelet";
/// What an agent may grow by for clients that do not take what they asked for.
const GROWTH_KIB: u64 = 24 << 10;

/// A node of the test's own, so that all sessions it counts are the test's.
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

/// How many sessions the node itself has spoken WebSocket with: commands, attaching, ports.
async fn streaming_requests(tenant: &Tenant) -> [u64; 3] {
    let path = format!("/api/v1/nodes/{}/proxy/metrics", tenant.node.name());
    let metrics = tenant.kubectl().ok(&["get", "--raw", &path]).await.unwrap();
    ["exec", "attach", "portforward"].map(|subresource| {
        let name = format!("kubelet_websocket_streaming_requests_total{{subresource=\"{subresource}\"}} ");
        metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap_or(0)
    })
}

/// Sessions of commands that go on. Nothing announces when one has ended.
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
    let said = exec(&[], "echo out; echo err >&2; exit 42", "").await;
    assert_eq!((said.code, said.out.as_str()), (42, "out\n"));
    assert!(said.err.starts_with("err\n") && said.err.contains("exit code 42"), "{said:?}");
    let said = exec(&["-i"], "cat; echo over; exit 7", "input\n").await;
    assert_eq!((said.code, said.out.as_str()), (7, "input\nover\n"), "the end of the input is reported: {said:?}");
    let much: String = std::iter::repeat_with(fastrand::alphanumeric).take(8 << 20).collect();
    let said = exec(&["-i"], "tee /tmp/much", &much).await;
    assert!(said.code == 0 && said.out == much, "{}: {} bytes of {}", said.code, said.out.len(), much.len());
    let said = exec(&["-i"], "md5sum </tmp/much; md5sum", &much).await;
    let sums: Vec<&str> = said.out.lines().collect();
    assert!(sums.len() == 2 && sums[0] == sums[1], "{said:?}");
    // Not much: containerd hangs now and then when a command exits before it has read all of its input.
    let said = exec(&["-i"], "echo enough; exit 9", "untaken\n").await;
    assert_eq!(
        (said.code, said.out.as_str()),
        (9, "enough\n"),
        "an end that comes before that of the input: {}",
        said.err
    );
    let said = kubectl.run(&["exec", "shell", "--", "no-such-program"]).await.unwrap();
    assert!(said.code != 0 && said.err.contains("no-such-program"), "{said:?}");
    assert_eq!(streaming_requests(&tenant).await, [sessions + 1, 0, 0]);

    on_a_terminal(&kubectl, "shell").await;
    copy_there_and_back(&kubectl, "shell", 16 << 20).await;
    // The terminal, two copies, and a look at what is where one of them goes.
    let sessions = sessions + 1 + 1 + 2 + 1;
    assert_eq!(streaming_requests(&tenant).await, [sessions, 0, 0]);

    let old = tenant.kubectl().without_websockets();
    let said = old.run_with(&["exec", "-i", "shell", "--", "sh", "-c", "cat; exit 3"], "input\n").await.unwrap();
    assert_eq!((said.code, said.out.as_str()), (3, "input\n"), "{said:?}");
    assert_eq!(streaming_requests(&tenant).await, [sessions, 0, 0], "an older client is carried as it is");
    delete_namespace(tenant).await;
}

#[tokio::test]
#[ignore = "real cluster"]
async fn attach_uses_websockets_to_the_node() {
    let tenant = new_namespace("websocket-attach", json!({})).await;
    let mut pod = tenant.shell("while read line; do echo heard $line; echo beside >&2; done; echo silence");
    pod["restartPolicy"] = json!("Never");
    pod["containers"][0]["stdin"] = json!(true);
    pod["containers"][0]["stdinOnce"] = json!(true);
    tenant.pod("listener", pod.clone()).await.unwrap();
    tenant.until_ready("listener").await.unwrap();
    let mut session = tenant.kubectl().start(&["attach", "-i", "listener"]).unwrap();
    session.send_until_output("you\n", "heard you").await.unwrap();
    session.until_output("beside").await.unwrap();
    session.close_input();
    tenant.until_phase("listener", "Succeeded").await.unwrap();
    let (_, said) = session.ended().await.unwrap();
    assert!(said.contains("silence"), "{said}");
    assert_eq!(streaming_requests(&tenant).await, [0, 1, 0]);

    // The container has a terminal, the client none: it asks for streams that the runtime does not serve.
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
    let (_, said) = session.ended().await.unwrap();
    assert!(said.contains("silence"), "{said}");
    assert_eq!(streaming_requests(&tenant).await, [0, 3, 0]);
    delete_namespace(tenant).await;
}

/// The ports on this machine that lead to the pod's.
async fn forward(kubectl: &Kubectl, ports: &[u16]) -> (Session, Vec<u16>) {
    let named: Vec<String> = ports.iter().map(|port| format!(":{port}")).collect();
    let arguments = ["port-forward", "pod/echo"].into_iter().chain(named.iter().map(String::as_str));
    let mut session = kubectl.start(&arguments.collect::<Vec<_>>()).unwrap();
    let mut local = Vec::new();
    for port in ports {
        let said = session.until_output(&format!("-> {port}\n")).await.unwrap();
        let line = said
            .lines()
            .find(|line| line.starts_with("Forwarding from 127.0.0.1:") && line.ends_with(&port.to_string()));
        local.push(line.unwrap().split([':', ' ']).nth(3).unwrap().parse().unwrap());
    }
    (session, local)
}

/// Sends this much to a port that sends it back.
async fn there_and_back(port: u16, length: usize) {
    let all: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(length).collect();
    let mut returned = vec![0; length];
    let talk = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let (mut read, mut write) = stream.split();
        let (sent, got) = tokio::join!(write.write_all(&all), read.read_exact(&mut returned));
        sent.and(got.map(|_| ())).unwrap();
    };
    timeout(TIMEOUT, talk).await.expect("in time");
    assert!(returned == all, "{length} bytes came back changed");
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
        tokio::join!(
            there_and_back(both[0], 8 << 20),
            there_and_back(both[1], 8 << 20),
            there_and_back(both[0], 1 << 20),
            there_and_back(both[1], 1),
        );
        assert_eq!(streaming_requests(&tenant).await, [0, 0, expected], "one session for all connections");
        // No process listens there; the refusal reaches kubectl, which exits.
        let mut refused = TcpStream::connect(("127.0.0.1", local[2])).await.unwrap();
        let ended = timeout(TIMEOUT, refused.read_to_end(&mut Vec::new())).await;
        assert!(ended.is_ok(), "{}", session.said());
        let (code, said) = session.ended().await.unwrap();
        assert!(code != 0 && said.contains("9003"), "{code}: {said}");
    }
    delete_namespace(tenant).await;
}

#[tokio::test]
#[ignore = "real cluster"]
async fn websocket_feature_can_be_disabled() {
    let gate = json!({ FEATURE: false });
    // Without declared features there is none of those that need to be declared.
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
        let said = tenant.kubectl().run_with(&command, "input\n").await.unwrap();
        assert_eq!((said.code, said.out.as_str()), (7, "input\n"), "{said:?}");
        tenant.pod("echo", tenant.shell("nc -ll -p 9001 -e cat")).await.unwrap();
        tenant.until_listening("echo", 9001).await.unwrap();
        let (_session, local) = forward(&tenant.kubectl(), &[9001]).await;
        there_and_back(local[0], 1 << 20).await;
        assert_eq!(streaming_requests(&tenant).await, [0; 3]);
        delete_namespace(tenant).await;
    }
}

/// Streams end with their client; a runtime that exits is reported to the client.
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

    // Nobody takes what this one says, so nobody reads that it is gone.
    let mut session = kubectl.start(&["exec", "-i", "shell", "--", "sh", "-c", "echo ready; sleep 3600"]).unwrap();
    session.until_output("ready").await.unwrap();
    let flood = async { while session.send(&"more ".repeat(10_000)).await.is_ok() {} };
    assert!(timeout(Duration::from_secs(2), flood).await.is_err(), "somebody takes it");
    assert_eq!(in_flight(&tenant).await, 1);
    drop(session);
    let ended = async {
        while in_flight(&tenant).await > 0 {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    timeout(TIMEOUT, ended).await.expect("the session of a client that is gone ends");

    let mut session = kubectl.start(&["exec", "-i", "shell", "--", "sh", "-c", "echo ready; cat"]).unwrap();
    session.until_output("ready").await.unwrap();
    tenant.node.kill_runtime().unwrap();
    let said = session.until_output("Internal error occurred").await.unwrap();
    assert!(said.contains("the runtime"), "{said}");
    let (code, said) = session.ended().await.unwrap();
    assert_ne!(code, 0, "{said}");
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
    // Without input: its end would come after the process's, and a runtime that has closed a connection by then drops
    // what it has not sent yet.
    let mut slow: Vec<_> = (0..8)
        .map(|_| kubectl.start(&["exec", "shell", "--", "sh", "-c", "echo ready; seq 1 4000000"]).unwrap())
        .collect();
    for session in &mut slow {
        session.until_output("ready").await.unwrap();
        session.suspend().unwrap();
    }
    let said = kubectl.ok(&["exec", "shell", "--", "sh", "-c", "sleep 5; seq 1 100000"]).await.unwrap();
    assert_eq!(said.lines().count(), 100_000, "others are served");
    let peak = kib(pid, "VmHWM");
    println!("{before} KiB became {peak}");
    assert!(peak < before + GROWTH_KIB, "{before} KiB became {peak}");
    // All at once: kubectl gives up on a connection when it has not come to read from it for a minute.
    for session in &slow {
        session.resume().unwrap();
    }
    for session in slow {
        let (code, said) = session.ended().await.unwrap();
        assert!(
            code == 0 && said.ends_with("\n3999999\n4000000\n"),
            "{code}: {} bytes, {:?}",
            said.len(),
            said.get(said.len() - 300..)
        );
    }
    delete_namespace(tenant).await;
}
