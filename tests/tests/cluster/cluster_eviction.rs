//! A node of a cluster that is below a memory threshold from its start: its condition, its taint, and the admission and
//! eviction of pods.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until;
use kube::Api;
use serde_json::json;

fn condition_is(node: Option<&Node>, type_: &str, value: &str) -> Option<()> {
    let mut conditions = node?.status.as_ref()?.conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == type_ && condition.status == value).then_some(())
}

#[tokio::test]
#[ignore = "real cluster"]
async fn a_pod_is_evicted_from_a_node_under_memory_pressure() {
    let cluster = Cluster::shared().await.unwrap();
    let changes = json!({
        "evictionHard": { "memory.available": "99.99%" }, "evictionPressureTransitionPeriod": "5s",
    });
    let node = Arc::new(ClusterNode::start(&cluster, changes).await.unwrap());
    let name = node.name().to_owned();
    let tenant = Tenant::on(cluster, node, "eviction").await.unwrap();
    let nodes: Api<Node> = Api::all(tenant.cluster.client());
    let under_pressure = |node: Option<&Node>| condition_is(node, "MemoryPressure", "True");
    until(&nodes, &name, "MemoryPressure", under_pressure).await.unwrap();
    let tainted = |node: Option<&Node>| {
        let mut taints = node?.spec.as_ref()?.taints.iter().flatten();
        taints.any(|taint| taint.key == "node.kubernetes.io/memory-pressure").then_some(())
    };
    until(&nodes, &name, "the taint of the control plane", tainted).await.unwrap();

    // Both are bound past the scheduler, which respects the taint. The kubelet admits the one with a request.
    let mut burstable = tenant.shell("sleep 3600");
    burstable["containers"][0]["resources"] = json!({ "requests": { "memory": "1Mi" } });
    burstable["restartPolicy"] = json!("Never");
    burstable["nodeName"] = json!(name);
    tenant.pod("burstable", burstable).await.unwrap();
    let mut best_effort = tenant.shell("sleep 3600");
    best_effort["nodeName"] = json!(name);
    tenant.pod("best-effort", best_effort).await.unwrap();
    let evicted = |pod: Option<&Pod>| pod?.status.clone().filter(|status| status.reason.as_deref() == Some("Evicted"));
    let status = tenant.until("burstable", "evicted", evicted).await.unwrap();
    let message = status.message.unwrap_or_default();
    assert!(message.starts_with("The node was low on resource: memory. Threshold quantity: "), "{message}");
    let disruption = status.conditions.iter().flatten().find(|condition| condition.type_ == "DisruptionTarget");
    let disruption = disruption.and_then(|condition| condition.reason.clone());
    assert_eq!((status.phase.as_deref(), disruption.as_deref()), (Some("Failed"), Some("TerminationByKubelet")));
    let status = tenant.until("best-effort", "rejected", evicted).await.unwrap();
    let message = status.message.unwrap_or_default();
    assert_eq!(message, "Pod was rejected: The node had condition: [MemoryPressure]. ");

    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}
