//! What kubectl shows of a node and its pods: `get`, `describe`, `top`, events, and cordoning.

use std::time::Duration;

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use keblet_peers::Part;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until_some;
use kube::Api;
use kube::api::ListParams;
use kube::runtime::watcher;
use serde_json::json;

#[tokio::test]
#[ignore = "real cluster"]
async fn describe_shows_pod_events() {
    let tenant = Tenant::new_namespace("describe").await.unwrap();
    let mut pod = tenant.shell("echo I am going; sleep 0.2; exit 7");
    pod["restartPolicy"] = json!("Never");
    tenant.pod("short", pod).await.unwrap();
    tenant.until_phase("short", "Failed").await.unwrap();
    until_events(&tenant, "short", &["Scheduled", "Pulled", "Created", "Started"]).await;
    let text = tenant.kubectl().ok(&["describe", "pod", "short"]).await.unwrap();
    let node = format!("{}/{}", tenant.node.name(), tenant.node.access.address);
    for expected in ["Status:           Failed", "Exit Code:    7", "Reason:       Error", &node, "containerd://"] {
        assert!(text.contains(expected), "{expected:?} is missing:\n{text}");
    }
    for reason in ["Pulled", "Created", "Started"] {
        let reported = |line: &str| line.split_whitespace().take(2).eq(["Normal", reason]);
        assert!(text.lines().any(reported), "no event {reason}:\n{text}");
    }
    tenant.delete_namespace().await.unwrap();
}

/// Events are sent some time after their cause.
async fn until_events(tenant: &Tenant, pod: &str, reasons: &[&str]) {
    let config = watcher::Config::default().fields(&format!("involvedObject.name={pod}"));
    let mut missing: Vec<&str> = reasons.to_vec();
    let reported = |event: &Event| {
        missing.retain(|reason| event.reason.as_deref() != Some(reason));
        missing.is_empty().then_some(())
    };
    let ended = until_some(tenant.api::<Event>(), config, "all events", reported).await;
    ended.unwrap_or_else(|error| panic!("{error:#}, of {reasons:?}\n{}", tenant.node.log_excerpt()));
}

#[tokio::test]
#[ignore = "real cluster"]
async fn node_object_matches_the_kubelet() {
    let tenant = Tenant::new_namespace("node").await.unwrap();
    let nodes: Api<Node> = Api::all(tenant.cluster.client());
    let node = nodes.get(tenant.node.name()).await.unwrap();
    let labels = node.metadata.labels.clone().unwrap();
    assert_eq!(labels.get("kubernetes.io/hostname").map(String::as_str), Some(tenant.node.name()));
    assert_eq!(labels.get("kubernetes.io/os").map(String::as_str), Some("linux"));
    let status = node.status.unwrap();
    let mut addresses: Vec<(String, String)> =
        status.addresses.unwrap().into_iter().map(|one| (one.type_, one.address)).collect();
    addresses.sort();
    let ip = tenant.node.access.address.to_string();
    let expected = [("Hostname", tenant.node.name()), ("InternalIP", ip.as_str())];
    assert_eq!(addresses, expected.map(|(kind, value)| (kind.to_owned(), value.to_owned())));
    let mut conditions: Vec<(String, String, String)> = status
        .conditions
        .unwrap()
        .into_iter()
        .map(|one| (one.type_, one.status, one.reason.unwrap_or_default()))
        .collect();
    conditions.sort();
    let expected = [
        ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
        ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
        ("PIDPressure", "False", "KubeletHasSufficientPID"),
        ("Ready", "True", "KubeletReady"),
    ];
    assert_eq!(conditions, expected.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())));
    let capacity = status.capacity.unwrap();
    for resource in ["cpu", "memory", "pods", "ephemeral-storage"] {
        assert!(capacity.contains_key(resource), "no {resource} in {capacity:?}");
    }
    let port = status.daemon_endpoints.unwrap().kubelet_endpoint.unwrap().port;
    assert_eq!(port, 10250);
    let text = tenant.kubectl().ok(&["describe", "node", tenant.node.name()]).await.unwrap();
    for expected in ["Container Runtime Version:  containerd://", "Allocated resources:", "RenewTime:"] {
        assert!(text.contains(expected), "{expected:?} is missing:\n{text}");
    }
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn top_shows_node_and_pod_usage() {
    let tenant = Tenant::new_namespace("top").await.unwrap();
    // Fails if it runs already.
    let started = tenant.cluster.on_control_plane(|plane| plane.start_part(Part::MetricsServer)).await;
    tenant.pod("busy", tenant.shell("while :; do :; done")).await.unwrap();
    tenant.until_ready("busy").await.unwrap();
    let kubectl = tenant.kubectl();
    let metrics_shown = async {
        // metrics-server scrapes in its own interval, and needs two samples for a rate.
        let mut tick = tokio::time::interval(Duration::from_secs(1));
        loop {
            tick.tick().await;
            let pods = kubectl.run(&["top", "pods", "--no-headers"]).await.unwrap();
            let nodes = kubectl.run(&["top", "nodes", "--no-headers"]).await.unwrap();
            let shown = nodes.out.lines().any(|line| line.starts_with(tenant.node.name()) && !line.contains("unknown"));
            if pods.out.starts_with("busy") && shown {
                return pods.out;
            }
        }
    };
    let Ok(pods) = tokio::time::timeout(TIMEOUT, metrics_shown).await else {
        let output = kubectl.run(&["top", "pods"]).await.unwrap();
        panic!("no metrics: {output:?}, metrics-server: {started:?}\n{}", tenant.node.log_excerpt());
    };
    let words: Vec<&str> = pods.split_whitespace().collect();
    let cpu: u32 = words[1].strip_suffix('m').unwrap().parse().unwrap();
    assert!(cpu >= 50, "a busy loop uses {cpu} thousandths of a core: {pods}");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn deleted_pod_terminates_gracefully() {
    let tenant = Tenant::new_namespace("delete").await.unwrap();
    // Prints a line on SIGTERM.
    let script = "trap 'echo goodbye; exit 0' TERM; echo hello; while :; do sleep 0.1; done";
    tenant.pod("polite", tenant.shell(script)).await.unwrap();
    tenant.until_ready("polite").await.unwrap();
    let mut follower = tenant.kubectl().start(&["logs", "-f", "polite"]).unwrap();
    follower.until_output("hello").await.unwrap();
    tenant.kubectl().ok(&["delete", "pod", "polite", "--wait"]).await.unwrap();
    assert!(tenant.api::<Pod>().list(&ListParams::default()).await.unwrap().items.is_empty());
    let (_, output) = follower.ended().await.unwrap();
    assert!(output.contains("goodbye"), "{output}");
    let left: Vec<_> = tenant.node.pods().unwrap();
    let ours: Vec<_> = left.iter().filter(|pod| pod.namespace == tenant.namespace && pod.ready).collect();
    assert!(ours.is_empty(), "still in the runtime: {ours:?}");
    tenant.delete_namespace().await.unwrap();
}
