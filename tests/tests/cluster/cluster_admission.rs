//! Pods that the API server accepts and the node has to reject: status and event have the reason.

use std::panic::AssertUnwindSafe;
use std::panic::resume_unwind;
use std::sync::Arc;

use futures_util::FutureExt as _;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::Part;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until;
use kube::Api;
use kube::api::ListParams;
use serde_json::Value;
use serde_json::json;

/// Name of the pod, fields of its spec, reason and message.
type Rejected = (&'static str, Value, &'static str, &'static str);

/// What this node cannot do, and a pod that was bound to it past the scheduler.
fn rejected(node: &str) -> Vec<Rejected> {
    let sysctls = json!([{ "name": "kernel.msgmax", "value": "65536" }]);
    let zone = json!([{ "key": "zone", "operator": "In", "values": ["elsewhere"] }]);
    let name = json!([{ "key": "metadata.name", "operator": "In", "values": ["elsewhere"] }]);
    let requiring = |term: Value| {
        let required = json!({ "nodeSelectorTerms": [term] });
        json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": required } })
    };
    let by_label = requiring(json!({ "matchExpressions": zone }));
    let by_name = requiring(json!({ "matchFields": name }));
    let elsewhere = "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector";
    let mut all = vec![
        (
            "unsafe-sysctl",
            json!({ "securityContext": { "sysctls": sysctls } }),
            "SysctlForbidden",
            "forbidden sysctl: \"kernel.msgmax\" not allowlisted",
        ),
        (
            "foreign-os",
            json!({ "os": { "name": "windows" } }),
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS",
        ),
        ("selector", json!({ "nodeName": node, "nodeSelector": { "zone": "elsewhere" } }), "NodeAffinity", elsewhere),
        ("affinity", json!({ "nodeName": node, "affinity": by_label }), "NodeAffinity", elsewhere),
        ("affinity-to-name", json!({ "nodeName": node, "affinity": by_name }), "NodeAffinity", elsewhere),
        (
            "strict-groups",
            json!({ "securityContext": { "supplementalGroupsPolicy": "Strict" } }),
            "SupplementalGroupsPolicyNotSupported",
            "SupplementalGroupsPolicy=Strict is not supported in this node",
        ),
    ];
    if !std::path::Path::new("/sys/module/apparmor").exists() {
        all.push((
            "app-armor",
            json!({ "securityContext": { "appArmorProfile": { "type": "RuntimeDefault" } } }),
            "AppArmor",
            "Cannot enforce AppArmor: AppArmor is not enabled on the host",
        ));
    }
    all
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pods_that_the_node_cannot_honour_are_rejected_with_upstreams_reason() {
    let tenant = Tenant::new_namespace("admission").await.unwrap();
    for (name, fields, reason, message) in rejected(tenant.node.name()) {
        let mut spec = tenant.shell("sleep 3600");
        spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        tenant.pod(name, spec).await.unwrap();
        let pod = tenant.until_phase(name, "Failed").await.unwrap();
        let status = pod.status.unwrap();
        let expected = format!("Pod was rejected: {message}");
        assert_eq!((status.reason.as_deref(), status.message), (Some(reason), Some(expected)), "{name}");
        assert!(status.container_statuses.unwrap_or_default().is_empty(), "{name} never ran");
        let about = ListParams::default().fields(&format!("involvedObject.name={name},reason={reason}"));
        let mut events = Vec::new();
        for _ in 0..100 {
            events = tenant.api::<Event>().list(&about).await.unwrap().items;
            if !events.is_empty() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        assert_eq!(events.first().and_then(|event| event.message.as_deref()), Some(message), "{name}");
    }
    let safe = json!([{ "name": "net.ipv4.ip_unprivileged_port_start", "value": "0" }]);
    let mut spec = tenant.shell("sleep 3600");
    spec["securityContext"] = json!({ "sysctls": safe });
    tenant.create::<Pod>(json!({ "metadata": { "name": "safe-sysctl" }, "spec": spec })).await.unwrap();
    tenant.until_ready("safe-sysctl").await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

/// Binds a pod to the node past the scheduler.
async fn bind(tenant: &Tenant, name: &str, requests: Value) {
    let mut spec = tenant.shell("trap 'exit 1' TERM; sleep 3600 & wait");
    spec["nodeName"] = json!(tenant.node.name());
    spec["containers"][0]["resources"] = json!({ "requests": requests });
    tenant.pod(name, spec).await.unwrap();
}

async fn rejection(tenant: &Tenant, name: &str) -> (String, String) {
    let pod = tenant.until_phase(name, "Failed").await.unwrap();
    let PodStatus { reason, message, container_statuses, .. } = pod.status.unwrap();
    assert!(container_statuses.unwrap_or_default().is_empty(), "{name} never ran");
    let folder = tenant.node.node.root.join("pods").join(pod.metadata.uid.unwrap());
    assert!(!folder.exists(), "{} is left", folder.display());
    (reason.unwrap(), message.unwrap())
}

fn full(resource: &str, requested: i64, used: i64, capacity: i64) -> (String, String) {
    let numbers = format!("requested: {requested}, used: {used}, capacity: {capacity}");
    let message = format!("Pod was rejected: Node didn't have enough resource: {resource}, {numbers}");
    (format!("OutOf{resource}"), message)
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pods_that_do_not_fit_are_rejected_and_critical_ones_preempt() {
    let cluster = Cluster::shared().await.unwrap();
    // The taint keeps pods of other tests away.
    let changes = json!({
        "maxPods": 2, "registerWithTaints": [{ "key": "small", "effect": "NoSchedule" }], "systemReserved": { "cpu": "100m" },
    });
    let node = Arc::new(ClusterNode::start(&cluster, changes).await.unwrap());
    let nodes: Api<Node> = Api::all(cluster.client());
    let capacity = nodes.get(node.name()).await.unwrap().status.unwrap().capacity.unwrap()["cpu"].0.clone();
    let allocatable = capacity.parse::<i64>().unwrap() * 1000 - 100;
    let tenant = Tenant::on(cluster, node, "room").await.unwrap();

    bind(&tenant, "burstable", json!({ "cpu": "200m" })).await;
    tenant.until_ready("burstable").await.unwrap();
    bind(&tenant, "large", json!({ "cpu": "500" })).await;
    assert_eq!(rejection(&tenant, "large").await, full("cpu", 500_000, 200, allocatable));
    bind(&tenant, "best-effort", json!({})).await;
    tenant.until_ready("best-effort").await.unwrap();
    bind(&tenant, "third", json!({})).await;
    assert_eq!(rejection(&tenant, "third").await, full("pods", 1, 2, 2));

    // A static pod is critical: it takes the place of a pod of the lowest class.
    let container =
        json!({ "name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "3600"] });
    let spec = json!({ "containers": [container], "terminationGracePeriodSeconds": 1 });
    let manifest = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "critical" }, "spec": spec });
    let file = tenant.node.node.manifests.join("critical.json");
    std::fs::write(&file, manifest.to_string()).unwrap();
    let preempted = |pod: Option<&Pod>| pod?.status.clone().filter(|status| status.phase.as_deref() == Some("Failed"));
    let victim = tenant.until("best-effort", "preempted", preempted).await.unwrap();
    let text = (victim.reason.as_deref(), victim.message.as_deref());
    assert_eq!(text, (Some("Preempting"), Some("Preempted in order to admit critical pod")));
    let disruption = victim.conditions.iter().flatten().find(|c| c.type_ == "DisruptionTarget").unwrap();
    assert_eq!((disruption.status.as_str(), disruption.reason.as_deref()), ("True", Some("TerminationByKubelet")));
    let mirrors: Api<Pod> = Api::namespaced(tenant.cluster.client(), "default");
    let mirror = format!("critical-{}", tenant.node.name());
    let runs = |pod: Option<&Pod>| {
        let status = pod?.status.as_ref()?;
        status.container_statuses.as_ref()?.first()?.state.as_ref()?.running.as_ref()?;
        status.container_statuses.as_ref()?.first()?.container_id.clone()
    };
    let critical = until(&mirrors, &mirror, "the critical pod runs", runs).await.unwrap();
    let kept = tenant.until("burstable", "it still runs", runs).await.unwrap();

    // Restarted with room for one pod, the agent keeps both that run.
    tenant.node.kill_agent().unwrap();
    let mut arguments: Vec<_> = tenant.node.node.cluster_arguments(&tenant.node.access).into_iter().collect();
    arguments.push("--max-pods=1".into());
    tenant.node.start_agent_with(arguments).await.unwrap();
    bind(&tenant, "late", json!({})).await;
    assert_eq!(rejection(&tenant, "late").await, full("pods", 1, 2, 1));
    assert_eq!(tenant.until("burstable", "it runs on", runs).await.unwrap(), kept);
    assert_eq!(until(&mirrors, &mirror, "it runs on", runs).await.unwrap(), critical);

    std::fs::remove_file(&file).unwrap();
    keblet_tests::cluster::until_gone(&mirrors, &mirror).await.unwrap();
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}

/// Tolerations of the taint `maintenance=now:NoExecute`, and whether they match it.
fn tolerations() -> [(&'static str, Value, bool); 9] {
    [
        ("of-all", json!([{ "operator": "Exists" }]), true),
        ("of-effect", json!([{ "operator": "Exists", "effect": "NoExecute" }]), true),
        ("of-key", json!([{ "key": "maintenance", "operator": "Exists" }]), true),
        ("of-value", json!([{ "key": "maintenance", "value": "now" }]), true),
        ("equal", json!([{ "key": "maintenance", "operator": "Equal", "value": "now", "effect": "NoExecute" }]), true),
        ("none", json!([]), false),
        ("other-key", json!([{ "key": "repair", "operator": "Exists" }]), false),
        ("other-value", json!([{ "key": "maintenance", "value": "later" }]), false),
        ("other-effect", json!([{ "operator": "Exists", "effect": "NoSchedule" }]), false),
    ]
}

/// Creates a pod with each of the tolerations on the tainted node, and checks what becomes of it.
async fn check_tolerations(tenant: &Tenant) {
    for (name, tolerations, _) in tolerations() {
        let mut spec = tenant.shell("sleep 3600");
        spec["nodeName"] = json!(tenant.node.name());
        spec["tolerations"] = tolerations;
        // The token's volume has a certificate that a controller may not have published yet.
        spec["automountServiceAccountToken"] = json!(false);
        tenant.pod(name, spec).await.unwrap();
    }
    let message = "Pod was rejected: Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate";
    for (name, _, is_tolerated) in tolerations() {
        if is_tolerated {
            tenant.until_ready(name).await.unwrap();
        } else {
            let found = rejection(tenant, name).await;
            assert_eq!((found.0.as_str(), found.1.as_str()), ("TaintToleration", message), "{name}");
        }
    }
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pods_run_on_a_tainted_node_if_they_tolerate_the_taint() {
    // Of its own, as its controllers are killed.
    let cluster = Cluster::exclusive().await.unwrap();
    let changes = json!({ "registerWithTaints": [{ "key": "maintenance", "value": "now", "effect": "NoExecute" }] });
    let node = Arc::new(ClusterNode::start(&cluster, changes).await.unwrap());
    let tenant = Tenant::on(cluster, node, "taints").await.unwrap();
    // One of them deletes the pods that do not tolerate the taint, perhaps before the node has decided on them.
    tenant.cluster.on_control_plane(|plane| plane.kill(Part::ControllerManager)).await.unwrap();
    let checked = AssertUnwindSafe(check_tolerations(&tenant)).catch_unwind().await;
    // Also after a failure: another test gets this control plane next.
    tenant.cluster.on_control_plane(|plane| plane.start_part(Part::ControllerManager)).await.unwrap();
    checked.unwrap_or_else(|panic| resume_unwind(panic));
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}
