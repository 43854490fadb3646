//! `keblet observe` beside upstream's kubelet as a node: an exit and an OOM kill are reported with names, and the kubelet
//! receives all its events. Its EventedPLEG is on, so that a lost event would delay a restart by minutes.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::Tenant;
use keblet_tests::observer::LEAST_PRIVILEGES;
use keblet_tests::observer::Observer;
use serde_json::Value;
use serde_json::json;

/// The kubelet's back-off before the second restart, with a margin; far less than the period of its relists (300 s).
const RESTARTS: Duration = Duration::from_secs(60);

fn restarts(pod: Option<&Pod>) -> i32 {
    let statuses = pod.and_then(|pod| pod.status.as_ref()).and_then(|status| status.container_statuses.as_ref());
    statuses.and_then(|statuses| statuses.first()).map_or(0, |status| status.restart_count)
}

#[tokio::test]
#[ignore = "real cluster"]
async fn exits_and_oom_kills_beside_a_go_kubelet_are_reported_and_no_event_is_taken() {
    let kubelet = keblet_peers::find_programs().unwrap().join("kubelet");
    if !kubelet.exists() {
        return keblet_skip::skip(&format!("needs {}: run `cargo xtask peers`", kubelet.display()));
    }
    let cluster = Cluster::shared().await.unwrap();
    let changes = json!({ "featureGates": { "EventedPLEG": true } });
    let node = ClusterNode::start_other(&cluster, &kubelet, changes).await.unwrap();
    let socket = node.socket().unwrap();
    let tenant = Tenant::on(cluster, Arc::new(node), "observe").await.unwrap();
    let namespace = tenant.namespace.clone();
    let mut observer = Observer::start(&socket, &LEAST_PRIVILEGES).unwrap();
    observer.until_ready().unwrap();

    tenant.pod("crashing", tenant.shell("sleep 1; exit 3")).await.unwrap();
    let mut hungry = tenant.shell("");
    let container = &mut hungry["containers"][0];
    container["image"] = json!(PROBE_IMAGE);
    container["command"] = json!(["/probe", "oom", "--child", "--mb", "256"]);
    container["resources"] = json!({ "limits": { "memory": "48Mi" } });
    tenant.pod("hungry", hungry).await.unwrap();

    let twice = |pod: Option<&Pod>| (restarts(pod) >= 2).then_some(());
    let restarted = tenant.until("crashing", "restarted twice", twice);
    tokio::time::timeout(RESTARTS, restarted).await.expect("the kubelet has lost an event").unwrap();
    let is_of = |record: &Value, pod: &str| record["pod"]["name"] == pod && record["pod"]["namespace"] == namespace;
    let exit = observer.until("exit", "the exit", |record| is_of(record, "crashing")).unwrap();
    assert_eq!((&exit["container"], &exit["exitCode"]), (&json!("main"), &json!(3)), "{exit}");
    let oom = observer.until("oom", "the kill", |record| is_of(record, "hungry")).unwrap();
    assert_eq!((&oom["container"], &oom["kills"]), (&json!("main"), &json!(1)), "{oom}");
    let metrics = observer.metrics().unwrap();
    assert!(metrics.contains(&format!("container=\"main\",namespace=\"{namespace}\",pod=\"crashing\"")), "{metrics}");
    // containerd 1.7 has one queue for all readers: the observer does not read from it, and says so.
    let runtime = observer.until("runtime", "the runtime", |_| true).unwrap();
    if runtime["version"].as_str().is_some_and(|version| version.contains("1.7.")) {
        let events = |record: &Value| record["sensor"] == "runtime-events" && record["reason"] != Value::Null;
        observer.until("sensor", "one reader", |record| events(record) && record["cost"] != Value::Null).unwrap();
    }
    drop(observer);
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}
