//! The Node object: registration, readiness, deletion and addresses.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;
use std::time::Instant;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::NodeCondition;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::until;
use keblet_tests::cluster::until_gone;
use kube::Api;
use kube::api::DeleteParams;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use serde_json::Value;
use serde_json::json;

/// Time without a response of the runtime after which the node is NotReady.
const RUNTIME_DOWN_AFTER: Duration = Duration::from_secs(30);
/// Tolerance: the interval of the agent's status requests, and a busy machine.
const SLACK: Duration = Duration::from_secs(8);

fn nodes(cluster: &Cluster) -> Api<Node> {
    Api::all(cluster.client())
}

fn leases(cluster: &Cluster) -> Api<Lease> {
    Api::namespaced(cluster.client(), "kube-node-lease")
}

fn ready(node: Option<&Node>) -> Option<&NodeCondition> {
    node?.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == "Ready")
}

fn labels(node: &Node) -> BTreeMap<String, String> {
    node.metadata.labels.clone().unwrap_or_default()
}

/// `key=value:effect` of the taints that the agent was configured to register with.
fn taints(node: &Node) -> Vec<String> {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    let reported = taints.filter(|taint| !taint.key.starts_with("node.kubernetes.io/"));
    reported
        .map(|taint| format!("{}={}:{}", taint.key, taint.value.clone().unwrap_or_default(), taint.effect))
        .collect()
}

fn addresses(node: &Node) -> Vec<String> {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    addresses.map(|address| format!("{} {}", address.type_, address.address)).collect()
}

/// The flags that every node is started with, and these.
fn flags(node: &ClusterNode, more: &[&str]) -> Vec<OsString> {
    node.node.cluster_arguments(&node.access).into_iter().chain(more.iter().map(OsString::from)).collect()
}

async fn create(cluster: &Cluster, node: Value) {
    let node: Node = serde_json::from_value(node).unwrap();
    nodes(cluster).create(&PostParams::default(), &node).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn new_node_registers_with_its_configuration() {
    let cluster = Cluster::shared().await.unwrap();
    let changes = json!({
        "registerWithTaints": [{ "key": "mine", "value": "yes", "effect": "PreferNoSchedule" }],
        "providerID": "test://7",
        "systemReserved": { "memory": "1Gi", "cpu": "100m" },
        "maxPods": 77,
    });
    let node = ClusterNode::prepare(&cluster, changes).await.unwrap();
    let labelled = flags(&node, &["--node-labels=tier=gold,node.kubernetes.io/kind=test"]);
    node.start_agent_with(labelled).await.unwrap();
    node.until_ready(&cluster).await.unwrap();
    let api = nodes(&cluster);
    let object = until(&api, node.name(), "images", |node| {
        node.filter(|node| node.status.as_ref().is_some_and(|status| status.images.is_some())).cloned()
    });
    let object = object.await.unwrap();
    let labels = labels(&object);
    for (key, value) in [("tier", "gold"), ("node.kubernetes.io/kind", "test"), ("kubernetes.io/hostname", node.name())]
    {
        assert_eq!(labels.get(key).map(String::as_str), Some(value), "{labels:?}");
    }
    assert_eq!(taints(&object), ["mine=yes:PreferNoSchedule"]);
    let ip = node.access.address;
    assert_eq!(addresses(&object), [format!("InternalIP {ip}"), format!("Hostname {}", node.name())]);
    assert_eq!(object.spec.clone().unwrap().provider_id.as_deref(), Some("test://7"));
    let status = object.status.clone().unwrap();
    let (capacity, allocatable) = (status.capacity.unwrap(), status.allocatable.unwrap());
    assert_eq!((capacity["pods"].0.as_str(), allocatable["pods"].0.as_str()), ("77", "77"));
    assert_ne!(capacity["memory"], allocatable["memory"]);
    let info = status.node_info.unwrap();
    assert!(info.kubelet_version.starts_with("v1.36."), "{}", info.kubelet_version);
    assert!(info.container_runtime_version.starts_with("containerd://"), "{}", info.container_runtime_version);
    assert!(!info.boot_id.is_empty() && !info.kernel_version.is_empty());
    assert_eq!(status.daemon_endpoints.unwrap().kubelet_endpoint.unwrap().port, 10250);
    until_event(&cluster, &node, "NodeReady").await;
    node.stop_and_delete(&cluster).await.unwrap();
}

/// Waits for an event of this reason on the node.
async fn until_event(cluster: &Cluster, node: &ClusterNode, reason: &str) {
    let events: Api<Event> = Api::default_namespaced(cluster.client());
    let selector = format!("involvedObject.kind=Node,involvedObject.name={},reason={reason}", node.name());
    let watch = kube::runtime::watcher(events, kube::runtime::watcher::Config::default().fields(&selector));
    let mut events = std::pin::pin!(kube::runtime::WatchStreamExt::applied_objects(watch));
    let found = tokio::time::timeout(keblet_tests::cluster::TIMEOUT, futures_util::StreamExt::next(&mut events)).await;
    let event = found.unwrap_or_else(|_| panic!("no event {reason}\n{}", node.log_excerpt())).unwrap().unwrap();
    assert_eq!(event.message, Some(format!("Node {} status is now: {reason}", node.name())));
    let object = nodes(cluster).get(node.name()).await.unwrap();
    assert_eq!(event.involved_object.uid, object.metadata.uid, "kubectl describe finds events by it");
}

#[tokio::test]
#[ignore = "real cluster"]
async fn node_lease_is_renewed() {
    let cluster = Cluster::shared().await.unwrap();
    let node = ClusterNode::start(&cluster, json!({ "nodeLeaseDurationSeconds": 8 })).await.unwrap();
    let uid = nodes(&cluster).get(node.name()).await.unwrap().metadata.uid;
    let api = leases(&cluster);
    let first = until(&api, node.name(), "a lease", |lease| lease.cloned()).await.unwrap();
    let spec = first.spec.clone().unwrap();
    assert_eq!(spec.holder_identity.as_deref(), Some(node.name()));
    assert_eq!(spec.lease_duration_seconds, Some(8));
    let owners = first.metadata.owner_references.unwrap();
    assert_eq!((owners[0].kind.as_str(), Some(owners[0].uid.clone())), ("Node", uid));
    let later = |lease: Option<&Lease>| (lease?.spec.as_ref()?.renew_time > spec.renew_time).then_some(());
    until(&api, node.name(), "renewed", later).await.unwrap();
    api.delete(node.name(), &DeleteParams::default()).await.unwrap();
    let anew = |lease: Option<&Lease>| (lease?.metadata.uid != first.metadata.uid).then_some(());
    until(&api, node.name(), "a new lease", anew).await.unwrap();
    node.stop_and_delete(&cluster).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn existing_node_is_updated_only_in_agent_owned_fields() {
    let cluster = Cluster::shared().await.unwrap();
    let node = ClusterNode::prepare(&cluster, json!({})).await.unwrap();
    let existing = json!({
        "metadata": { "name": node.name(), "labels": { "kubernetes.io/os": "plan9", "theirs": "kept" } },
        "spec": { "taints": [{ "key": "theirs", "effect": "PreferNoSchedule" }] },
    });
    create(&cluster, existing).await;
    node.start_agent_with(flags(&node, &["--node-labels=late=no"])).await.unwrap();
    node.until_ready(&cluster).await.unwrap();
    let object = nodes(&cluster).get(node.name()).await.unwrap();
    let labels = labels(&object);
    assert_eq!(labels.get("kubernetes.io/os").map(String::as_str), Some("linux"));
    assert_eq!(labels.get("theirs").map(String::as_str), Some("kept"));
    assert_eq!(labels.get("late"), None, "labels are set at registration only");
    assert_eq!(taints(&object), ["theirs=:PreferNoSchedule"]);
    node.stop_and_delete(&cluster).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn node_without_runtime_becomes_not_ready() {
    let cluster = Cluster::shared().await.unwrap();
    let node = ClusterNode::start(&cluster, json!({})).await.unwrap();
    let killed = Instant::now();
    node.kill_runtime().unwrap();
    let down = |node: Option<&Node>| {
        let ready = ready(node)?;
        let message = ready.message.clone().unwrap_or_default();
        (ready.status == "False" && message.contains("container runtime is down")).then_some(())
    };
    let api = nodes(&cluster);
    until(&api, node.name(), "NotReady without runtime", down).await.unwrap();
    // 30 s after the runtime's last response, which may be some seconds before it was killed.
    let after = killed.elapsed();
    assert!((RUNTIME_DOWN_AFTER - SLACK..RUNTIME_DOWN_AFTER + SLACK).contains(&after), "NotReady after {after:?}");
    until_event(&cluster, &node, "NodeNotReady").await;
    node.start_runtime().unwrap();
    node.until_ready(&cluster).await.unwrap();
    node.stop_and_delete(&cluster).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn deleted_node_stays_deleted_until_the_agent_restarts() {
    let cluster = Cluster::shared().await.unwrap();
    // Longer than many periods of status updates.
    let changes = json!({ "nodeStatusUpdateFrequency": "1s", "nodeLeaseDurationSeconds": 4 });
    let node = ClusterNode::start(&cluster, changes).await.unwrap();
    let api = nodes(&cluster);
    let before = api.get(node.name()).await.unwrap().metadata.uid;
    api.delete(node.name(), &DeleteParams::default()).await.unwrap();
    until_gone(&api, node.name()).await.unwrap();
    let deleted = Instant::now();
    while deleted.elapsed() < Duration::from_secs(8) {
        let found = api.get_opt(node.name()).await.unwrap();
        assert!(found.is_none(), "a running agent registered again after {:?}", deleted.elapsed());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    node.end_agent().unwrap();
    assert!(api.get_opt(node.name()).await.unwrap().is_none(), "registered by an agent that is being stopped");
    node.start_agent().await.unwrap();
    node.until_ready(&cluster).await.unwrap();
    assert_ne!(api.get(node.name()).await.unwrap().metadata.uid, before);
    node.stop_and_delete(&cluster).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn cloud_provider_addresses_are_kept() {
    let cluster = Cluster::shared().await.unwrap();
    let node = ClusterNode::prepare(&cluster, json!({})).await.unwrap();
    node.start_agent_with(flags(&node, &["--cloud-provider=external"])).await.unwrap();
    node.until_ready(&cluster).await.unwrap();
    let api = nodes(&cluster);
    let object = api.get(node.name()).await.unwrap();
    assert_eq!(taints(&object), ["node.cloudprovider.kubernetes.io/uninitialized=true:NoSchedule"]);
    let annotations = object.metadata.annotations.unwrap();
    let ip = node.access.address.to_string();
    assert_eq!(annotations.get("alpha.kubernetes.io/provided-node-ip"), Some(&ip));
    let given = json!({ "status": { "addresses": [
        { "type": "ExternalIP", "address": "203.0.113.7" },
        { "type": "InternalIP", "address": ip },
        { "$patch": "replace" },
    ] } });
    api.patch_status(node.name(), &PatchParams::default(), &Patch::Strategic(&given)).await.unwrap();
    node.end_agent().unwrap();
    let before = ready(Some(&api.get(node.name()).await.unwrap())).unwrap().last_heartbeat_time.clone();
    node.start_agent_with(flags(&node, &["--cloud-provider=external"])).await.unwrap();
    let beat = |node: Option<&Node>| (ready(node)?.last_heartbeat_time > before).then(|| node.map(addresses)).flatten();
    let addresses = until(&api, node.name(), "a heartbeat", beat).await.unwrap();
    assert_eq!(addresses, ["ExternalIP 203.0.113.7".to_owned(), format!("InternalIP {ip}")]);
    node.stop_and_delete(&cluster).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn register_node_false_creates_no_node() {
    let cluster = Cluster::shared().await.unwrap();
    let node = ClusterNode::prepare(&cluster, json!({ "registerNode": false })).await.unwrap();
    node.start_agent().await.unwrap();
    // By then it has tried to update its status, and has not created a Node.
    let deadline = std::time::Instant::now() + keblet_tests::cluster::TIMEOUT;
    while !node.log_excerpt().contains("cannot update the node status") {
        assert!(std::time::Instant::now() < deadline, "{}", node.log_excerpt());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert!(nodes(&cluster).get_opt(node.name()).await.unwrap().is_none());
    create(&cluster, json!({ "metadata": { "name": node.name() } })).await;
    node.until_ready(&cluster).await.unwrap();
    node.stop_and_delete(&cluster).await.unwrap();
}
