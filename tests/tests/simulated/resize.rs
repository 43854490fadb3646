//! In-place resizes on a whole simulated node (KEP-1287): from the desired resources to the runtime, the pod's cgroup and the
//! status, with refusals by the node and by the runtime, and restarts of the agent.

mod features;
mod pod_level;
mod refusals;
mod restarts;
mod room;
mod stops;
mod waiting;

use std::collections::BTreeSet;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use keblet::admission::NodeInfo;
use keblet::admission::NodeOffer;
use keblet::admission::Quantities;
use keblet::allocation::ResizePolicy;
use keblet::cgroups::CgroupName;
use keblet::cgroups::Cgroups;
use keblet::cgroups::Driver;
use keblet::cgroups::Layout;
use keblet::metrics::Metrics;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::workers::generate::ResourceSettings;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::RecordedEvents;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::recorder;
use keblet_tests::node::shortage::until_true;
use keblet_tests::node::until;
use serde_json::Value;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::Instant;
use tokio::time::sleep;

use crate::housekeeping::paused;

/// What a resize may take from the change of the spec to the last call to the runtime.
const BUDGET: Duration = Duration::from_millis(100);
const LONG: Duration = Duration::from_secs(600);

/// A pod of the API server: its container's resources, and other fields of the container.
fn sized(name: &str, generation: i64, resources: Value, fields: Value) -> Pod {
    let built = pod(name).running("main", "run").from_api().build();
    let mut object = serde_json::to_value(&*built).expect("a pod");
    object["metadata"]["generation"] = json!(generation);
    let container = object["spec"]["containers"][0].as_object_mut().expect("a container");
    container.insert("resources".to_owned(), resources);
    container.extend(fields.as_object().expect("fields").clone());
    Arc::new(serde_json::from_value(object).expect("a pod"))
}

fn cpu(name: &str, generation: i64, cpu: &str) -> Pod {
    sized(name, generation, json!({ "requests": { "cpu": cpu } }), json!({}))
}

/// Requests that equal the limits.
fn both(cpu: &str, memory: &str) -> Value {
    let amounts = json!({ "cpu": cpu, "memory": memory });
    json!({ "requests": amounts, "limits": amounts })
}

/// A simulated node and its agent.
struct ResizableNode {
    sim: SimRuntime,
    folder: TempDir,
    /// Hierarchies of cgroup v1, where writing a value creates its file.
    tree: TempDir,
    milli_cpu: i64,
    policy: ResizePolicy,
    /// Features that the node declares; `None` if it declares none at all.
    declared_features: Option<Arc<BTreeSet<String>>>,
}

impl ResizableNode {
    fn new(milli_cpu: i64) -> Self {
        let ((sim, folder), tree) = (node(), tempfile::tempdir().expect("a folder"));
        for controller in ["cpu", "memory", "pids", "hugetlb"] {
            std::fs::create_dir(tree.path().join(controller)).expect("a folder");
        }
        Self { sim, folder, tree, milli_cpu, policy: ResizePolicy::default(), declared_features: None }
    }

    fn start(&self, pods: Vec<Pod>) -> (Agent, Arc<Metrics>, RecordedEvents) {
        let mounts = ["cpu", "memory", "pids", "hugetlb"].map(|name| (name.to_owned(), self.tree.path().join(name)));
        let layout = Layout::V1 { controllers: mounts.into(), unified: None };
        let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
        let resources = ResourceSettings { cfs_period: Some(100_000), page_size: 4096, ..ResourceSettings::default() };
        let allocatable = Quantities { milli_cpu: self.milli_cpu, ..Quantities::unlimited() };
        let info = NodeInfo { name: "sim".to_owned(), allocatable, ..NodeInfo::default() };
        let (node, declared_features) = (Some(Arc::new(info)), self.declared_features.clone());
        let offer = NodeOffer { node, declared_features, pod_level_resources: true, ..NodeOffer::default() };
        let ((recorder, events), root) = (recorder(), self.folder.path());
        let (agent, metrics) =
            Agent::start_resizing(&self.sim, root, pods, recorder, (offer, self.policy), (Some(cgroups), resources));
        (agent, metrics, events)
    }

    /// A file of a pod's cgroup.
    fn file(&self, controller: &str, pod: &str, name: &str) -> PathBuf {
        self.tree.path().join(controller).join(pod).join(name)
    }

    /// What the runtime has for the pod's container: shares, quota, memory limit.
    fn applied(&self, name: &str) -> [i64; 3] {
        let status = self.sim.statuses(name).pop().expect("a container");
        let linux = status.resources.and_then(|resources| resources.linux).expect("resources");
        [linux.cpu_shares, linux.cpu_quota, linux.memory_limit_in_bytes]
    }

    async fn until_running(&self, name: &'static str) {
        until(&self.sim, "it runs", move |trace| trace.live(name, "main").is_some()).await;
    }

    /// How many instances the container has had.
    fn instances(&self, name: &str) -> usize {
        self.sim.trace(|trace| trace.history(name, "main").count())
    }
}

fn status(agent: &Agent, name: &str) -> PodStatus {
    agent.statuses.get(&PodUid::from(format!("{name}-uid"))).unwrap_or_default()
}

fn condition(agent: &Agent, name: &str, type_: &str) -> Option<PodCondition> {
    status(agent, name).conditions.into_iter().flatten().find(|condition| condition.type_ == type_)
}

/// Reason, message and generation of the pending condition.
fn pending(agent: &Agent, name: &str) -> Option<(String, String, i64)> {
    let condition = condition(agent, name, "PodResizePending")?;
    Some((condition.reason?, condition.message?, condition.observed_generation?))
}

fn is_settled(agent: &Agent, name: &str) -> bool {
    ["PodResizePending", "PodResizeInProgress"].into_iter().all(|type_| condition(agent, name, type_).is_none())
}

/// Reasons and messages of the events on resizes.
fn resize_events(events: &RecordedEvents) -> Vec<(String, String)> {
    let events = events.lock().expect("not poisoned");
    let text = |event: &Value, field: &str| event[field].as_str().unwrap_or_default().to_owned();
    let all = events.iter().map(|(_, event)| (text(event, "reason"), text(event, "message")));
    all.filter(|(reason, _)| reason.starts_with("Resize")).collect()
}

fn reasons(events: &RecordedEvents) -> Vec<String> {
    resize_events(events).into_iter().map(|(reason, _)| reason).collect()
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[tokio::test(start_paused = true)]
async fn a_pod_grows_and_shrinks_without_a_restart() {
    let site = ResizableNode::new(4000);
    let pod = |generation, cpu: &str, memory: &str| sized("web", generation, both(cpu, memory), json!({}));
    let (agent, metrics, events) = site.start(vec![pod(1, "500m", "64Mi")]);
    site.until_running("web").await;
    assert_eq!(site.applied("web"), [512, 50_000, 64 << 20]);

    let began = Instant::now();
    agent.update(pod(2, "1500m", "128Mi")).await;
    until_true("it has grown", || site.applied("web") == [1536, 150_000, 128 << 20]).await;
    assert!(began.elapsed() <= BUDGET, "{:?}", began.elapsed());
    until_true("it is done", || is_settled(&agent, "web") && reasons(&events).len() == 2).await;
    let cgroup = "kubepods/podweb-uid";
    assert_eq!(text(&site.file("cpu", cgroup, "cpu.shares")), "1536");
    assert_eq!(text(&site.file("cpu", cgroup, "cpu.cfs_quota_us")), "150000");
    assert_eq!(text(&site.file("memory", cgroup, "memory.limit_in_bytes")), (128 << 20).to_string());
    let expected = r#"{"containers":[{"name":"main","resources":{"limits":{"cpu":"1500m","memory":"128Mi"},"requests":{"cpu":"1500m","memory":"128Mi"}}}],"generation":2}"#;
    let started = ("ResizeStarted".to_owned(), format!("Pod resize started: {expected}"));
    let completed = ("ResizeCompleted".to_owned(), format!("Pod resize completed: {expected}"));
    assert_eq!(resize_events(&events), [started, completed]);
    let container = status(&agent, "web").container_statuses.expect("statuses").remove(0);
    let shown = serde_json::to_value((container.allocated_resources, container.resources)).expect("JSON");
    let amounts = json!({ "cpu": "1500m", "memory": "128Mi" });
    assert_eq!(shown, json!([amounts, { "limits": amounts, "requests": amounts }]));
    let of_pod = status(&agent, "web");
    assert_eq!(serde_json::to_value(of_pod.allocated_resources).expect("JSON"), amounts);
    assert_eq!(of_pod.observed_generation, Some(2));

    // Memory is taken away only if it is not in use.
    let usage = site.file("memory", cgroup, "memory.usage_in_bytes");
    std::fs::write(&usage, (100 << 20).to_string()).expect("written");
    std::fs::write(usage.with_file_name("memory.stat"), "total_inactive_file 0\n").expect("written");
    agent.update(pod(3, "250m", "64Mi")).await;
    let error = || condition(&agent, "web", "PodResizeInProgress").and_then(|condition| condition.reason);
    until_true("it fails", || error().as_deref() == Some("Error")).await;
    let message =
        "cannot decrease memory limits: attempting to set pod memory limit (67108864) below current usage (104857600)";
    let failed = condition(&agent, "web", "PodResizeInProgress").expect("a condition");
    assert_eq!((failed.message.as_deref(), failed.observed_generation), (Some(message), Some(3)));
    assert_eq!(site.applied("web"), [1536, 150_000, 128 << 20], "nothing was applied");
    assert_eq!(text(&site.file("cpu", cgroup, "cpu.shares")), "1536");
    let still = status(&agent, "web").resources.expect("resources").limits.expect("limits");
    assert_eq!(still["cpu"].0, "1500m", "what is in force");

    std::fs::write(&usage, (20 << 20).to_string()).expect("written");
    until_true("it has shrunk", || site.applied("web") == [256, 25_000, 64 << 20] && is_settled(&agent, "web")).await;
    assert_eq!(text(&site.file("memory", cgroup, "memory.limit_in_bytes")), (64 << 20).to_string());
    assert_eq!(text(&site.file("cpu", cgroup, "cpu.cfs_quota_us")), "25000");
    until_true("the event", || reasons(&events).len() == 5).await;
    let all = ["ResizeStarted", "ResizeCompleted", "ResizeStarted", "ResizeError", "ResizeCompleted"];
    assert_eq!(reasons(&events), all);
    assert_eq!(site.instances("web"), 1);
    let families = metrics.render().expect("metrics");
    for line in [
        r#"kubelet_container_requested_resizes_total{operation="increase",requirement="limits",resource="cpu"} 1"#,
        r#"kubelet_container_requested_resizes_total{operation="decrease",requirement="requests",resource="memory"} 1"#,
        r#"kubelet_pod_resize_duration_milliseconds_count{success="true"} 2"#,
        "kubelet_pod_in_progress_resizes 0",
    ] {
        assert!(families.contains(line), "{line}\n{families}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_resize_waits_for_room_until_another_pod_is_gone() {
    let site = ResizableNode::new(4000);
    let (agent, metrics, events) = site.start(vec![cpu("one", 1, "1"), cpu("two", 1, "2")]);
    site.until_running("one").await;
    site.until_running("two").await;
    agent.update(cpu("one", 2, "2500m")).await;
    until_true("it waits", || pending(&agent, "one").is_some()).await;
    let message = "Node didn't have enough resource: cpu, requested: 2500, used: 2000, capacity: 4000";
    assert_eq!(pending(&agent, "one"), Some(("Deferred".to_owned(), message.to_owned(), 2)));
    until_true("the event", || reasons(&events) == ["ResizeDeferred"]).await;
    let (_, text) = resize_events(&events).remove(0);
    assert!(text.starts_with("Pod resize OutOfcpu: {") && text.contains(message), "{text}");
    let families = metrics.render().expect("metrics");
    assert!(families.contains(r#"kubelet_pod_pending_resizes{reason="deferred"} 1"#), "{families}");
    // Trying again is no news, and a new pod gets what is not allocated.
    sleep(LONG).await;
    assert_eq!(reasons(&events).len(), 1);
    assert_eq!(site.applied("one")[0], 1024);
    let container = status(&agent, "one").container_statuses.expect("statuses").remove(0);
    assert_eq!(container.allocated_resources.expect("resources")["cpu"].0, "1");

    agent.remove(cpu("two", 1, "2")).await;
    until_true("it has grown", || site.applied("one")[0] == 2560 && is_settled(&agent, "one")).await;
    let accepted = r#"kubelet_pod_deferred_accepted_resizes_total{retry_trigger="pods_removed"} 1"#;
    let families = metrics.render().expect("metrics");
    assert!(families.contains(accepted), "{families}");
    assert_eq!(site.instances("one"), 1);
}

#[tokio::test(start_paused = true)]
async fn room_that_a_shrinking_pod_frees_is_given_to_one_that_waits() {
    let site = ResizableNode::new(4000);
    let (agent, metrics, _) = site.start(vec![cpu("one", 1, "1"), cpu("two", 1, "3")]);
    site.until_running("one").await;
    site.until_running("two").await;
    agent.update(cpu("one", 2, "2")).await;
    until_true("it waits", || pending(&agent, "one").is_some()).await;
    // The runtime has not taken the CPU away yet: it is still in use.
    let failure = FaultKind::Fail(tonic::Code::Unknown, "busy".to_owned());
    site.sim
        .faults(|faults| faults.add(CallFault::on(Method::UpdateContainerResources, failure).about("two").times(1)));
    agent.update(cpu("two", 2, "1")).await;
    let failed = || condition(&agent, "two", "PodResizeInProgress").and_then(|c| c.reason);
    until_true("it fails", || failed().as_deref() == Some("Error")).await;
    assert!(pending(&agent, "one").is_some());
    until_true("both are applied", || site.applied("two")[0] == 1024 && site.applied("one")[0] == 2048).await;
    let families = metrics.render().expect("metrics");
    let accepted = r#"kubelet_pod_deferred_accepted_resizes_total{retry_trigger="pod_resized"} 1"#;
    assert!(families.contains(accepted), "{families}");
}

#[tokio::test(start_paused = true)]
async fn a_resize_that_is_taken_back_no_longer_waits() {
    let site = ResizableNode::new(4000);
    let (agent, ..) = site.start(vec![cpu("one", 1, "1")]);
    site.until_running("one").await;
    agent.update(cpu("one", 2, "5")).await;
    until_true("it waits", || pending(&agent, "one").is_some()).await;
    let message = "Node didn't have enough resource: cpu, requested: 5000, used: 0, capacity: 4000";
    assert_eq!(pending(&agent, "one"), Some(("Deferred".to_owned(), message.to_owned(), 2)));
    agent.update(cpu("one", 3, "1")).await;
    until_true("it does not wait", || is_settled(&agent, "one")).await;
    assert_eq!(site.applied("one")[0], 1024);
}

#[tokio::test(start_paused = true)]
async fn a_resize_that_the_node_never_does_is_infeasible() {
    let policy = ResizePolicy { fixed_cpus: true, ..ResizePolicy::default() };
    let site = ResizableNode { policy, ..ResizableNode::new(4000) };
    let pod = |generation, cpu: &str| sized("web", generation, both(cpu, "64Mi"), json!({}));
    let (agent, metrics, events) = site.start(vec![pod(1, "1500m")]);
    site.until_running("web").await;
    agent.update(pod(2, "1600m")).await;
    until_true("it is refused", || pending(&agent, "web").is_some()).await;
    let message = r#"Resize is infeasible for Guaranteed Pods alongside CPU Manager policy "static""#;
    assert_eq!(pending(&agent, "web"), Some(("Infeasible".to_owned(), message.to_owned(), 2)));
    sleep(LONG).await;
    assert_eq!(reasons(&events), ["ResizeInfeasible"]);
    assert!(resize_events(&events)[0].1.starts_with("Pod resize Infeasible: {"), "{:?}", resize_events(&events));
    assert_eq!(site.applied("web")[0], 1536);
    let families = metrics.render().expect("metrics");
    let counted = r#"kubelet_pod_infeasible_resizes_total{reason_detail="guaranteed_pod_cpu_manager_static_policy"} 1"#;
    assert!(families.contains(counted), "it is judged once: {families}");
}

#[tokio::test(start_paused = true)]
async fn a_container_is_restarted_for_a_resource_whose_policy_says_so() {
    let site = ResizableNode::new(4000);
    let policy = json!({ "resizePolicy": [{ "resourceName": "memory", "restartPolicy": "RestartContainer" }] });
    let pod = |generation, cpu: &str, memory: &str| sized("web", generation, both(cpu, memory), policy.clone());
    let (agent, _, events) = site.start(vec![pod(1, "500m", "64Mi")]);
    site.until_running("web").await;
    agent.update(pod(2, "1", "64Mi")).await;
    until_true("it has grown", || site.applied("web")[0] == 1024 && is_settled(&agent, "web")).await;
    assert_eq!(site.instances("web"), 1);
    agent.update(pod(3, "1", "128Mi")).await;
    until(&site.sim, "it was restarted", |trace| trace.history("web", "main").count() == 2).await;
    site.until_running("web").await;
    until_true("it is done", || is_settled(&agent, "web") && reasons(&events).len() == 4).await;
    assert_eq!(site.applied("web"), [1024, 100_000, 128 << 20]);
    let limit = site.file("memory", "kubepods/podweb-uid", "memory.limit_in_bytes");
    assert_eq!(text(&limit), (128 << 20).to_string(), "the pod's cgroup follows");
    let killing = events
        .lock()
        .expect("not poisoned")
        .iter()
        .any(|(_, event)| event["message"].as_str() == Some("Container main resize requires restart"));
    assert!(killing);
    assert_eq!(status(&agent, "web").container_statuses.expect("statuses")[0].restart_count, 1);
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_refuses_is_asked_again() {
    let site = ResizableNode::new(4000);
    let (agent, metrics, events) = site.start(vec![cpu("web", 1, "1")]);
    site.until_running("web").await;
    let failure = FaultKind::Fail(tonic::Code::Unknown, "no such shim".to_owned());
    site.sim.faults(|faults| faults.add(CallFault::on(Method::UpdateContainerResources, failure).times(2)));
    agent.update(cpu("web", 2, "2")).await;
    let failed = || condition(&agent, "web", "PodResizeInProgress").and_then(|condition| condition.message);
    until_true("it fails", || failed().is_some()).await;
    let expected = r#"failed to update the cpu of container "main": rpc error: code = Unknown desc = no such shim"#;
    assert_eq!(failed().as_deref(), Some(expected));
    until_true("it has grown", || site.applied("web")[0] == 2048 && is_settled(&agent, "web")).await;
    until_true("the event", || reasons(&events).len() == 3).await;
    assert_eq!(reasons(&events), ["ResizeStarted", "ResizeError", "ResizeCompleted"], "an error is reported once");
    let families = metrics.render().expect("metrics");
    assert!(families.contains(r#"kubelet_pod_resize_duration_milliseconds_count{success="false"} 2"#), "{families}");
    assert_eq!(site.instances("web"), 1);
}

/// A pod with a volume that has the pod's labels.
fn labelled(generation: i64, amount: &str, level: &str) -> Pod {
    let mounts = json!({ "volumeMounts": [{ "name": "info", "mountPath": "/info" }] });
    let built = sized("web", generation, json!({ "requests": { "cpu": amount } }), mounts);
    let mut object = serde_json::to_value(&*built).expect("a pod");
    object["metadata"]["labels"] = json!({ "level": level });
    let items = json!([{ "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } }]);
    object["spec"]["volumes"] = json!([{ "name": "info", "downwardAPI": { "defaultMode": 420, "items": items } }]);
    Arc::new(serde_json::from_value(object).expect("a pod"))
}

#[test]
fn volumes_are_refreshed_while_a_resize_fails() {
    paused(async || {
        let site = ResizableNode::new(4000);
        let (agent, ..) = site.start(vec![labelled(1, "1", "low")]);
        site.until_running("web").await;
        let file = site.folder.path().join("pods/web-uid/volumes/kubernetes.io~downward-api/info/labels");
        assert_eq!(text(&file), "level=\"low\"");
        let failure = FaultKind::Fail(tonic::Code::Unknown, "no such shim".to_owned());
        site.sim.faults(|faults| faults.add(CallFault::on(Method::UpdateContainerResources, failure)));
        agent.update(labelled(2, "2", "low")).await;
        let fails = || condition(&agent, "web", "PodResizeInProgress").is_some_and(|found| found.message.is_some());
        until_true("it fails", fails).await;
        agent.update(labelled(2, "2", "high")).await;
        until_true("the file has the new label", || text(&file) == "level=\"high\"").await;
        assert!(fails(), "the resize is still tried");
    });
}

#[tokio::test(start_paused = true)]
async fn a_restarted_agent_goes_on_with_what_was_allocated_and_what_waits() {
    let site = ResizableNode::new(4000);
    let (agent, ..) = site.start(vec![cpu("fits", 1, "1"), cpu("waits", 1, "1")]);
    site.until_running("fits").await;
    site.until_running("waits").await;
    let failure = FaultKind::Fail(tonic::Code::Unknown, "busy".to_owned());
    site.sim.faults(|faults| faults.add(CallFault::on(Method::UpdateContainerResources, failure)));
    agent.update(cpu("fits", 2, "2")).await;
    agent.update(cpu("waits", 2, "3")).await;
    until_true("one waits", || pending(&agent, "waits").is_some()).await;
    until_true("one fails", || condition(&agent, "fits", "PodResizeInProgress").is_some_and(|c| c.reason.is_some()))
        .await;
    sleep(Duration::from_secs(1)).await;
    drop(agent);
    site.sim.faults(Faults::clear);

    // It is admitted with what it has, although it desires more than there is.
    let (agent, _, events) = site.start(vec![cpu("waits", 2, "3"), cpu("fits", 2, "2")]);
    until_true("one is applied", || site.applied("fits")[0] == 2048 && is_settled(&agent, "fits")).await;
    until_true("one waits again", || pending(&agent, "waits").is_some()).await;
    assert_eq!(site.applied("waits")[0], 1024);
    until_true("both events", || reasons(&events).len() == 2).await;
    let mut all = reasons(&events);
    all.sort();
    assert_eq!(all, ["ResizeCompleted", "ResizeDeferred"]);
    assert_eq!([site.instances("fits"), site.instances("waits")], [1, 1]);
    agent.remove(cpu("fits", 2, "2")).await;
    until_true("the other is applied", || site.applied("waits")[0] == 3072).await;
}

#[tokio::test(start_paused = true)]
async fn containers_of_an_agent_without_records_are_left_alone() {
    let site = ResizableNode::new(4000);
    let policy = json!({ "resizePolicy": [{ "resourceName": "cpu", "restartPolicy": "RestartContainer" }] });
    let pod = || sized("web", 1, both("15m", "64Mi"), policy.clone());
    let (agent, ..) = site.start(vec![pod()]);
    site.until_running("web").await;
    sleep(Duration::from_secs(1)).await;
    drop(agent);
    for name in ["allocated_pods_state", "actuated_pods_state"] {
        std::fs::remove_file(site.folder.path().join(name)).expect(name);
    }
    let (agent, ..) = site.start(vec![pod()]);
    sleep(LONG).await;
    let updates = site.sim.trace(|l| l.calls().filter(|call| call.method == Method::UpdateContainerResources).count());
    assert_eq!((site.instances("web"), updates), (1, 0));
    assert!(is_settled(&agent, "web"));
}

#[tokio::test(start_paused = true)]
async fn pod_level_resources_are_added_to_a_pod_that_runs() {
    let site = ResizableNode::new(4000);
    let web = |generation| sized("web", generation, both("250m", "64Mi"), json!({}));
    let (agent, _, events) = site.start(vec![web(1)]);
    site.until_running("web").await;
    let mut resized = (*web(2)).clone();
    let amounts = serde_json::from_value(both("500m", "96Mi")).expect("resources");
    resized.spec.as_mut().expect("a spec").resources = Some(amounts);
    agent.update(Arc::new(resized)).await;
    let cgroup = "kubepods/podweb-uid";
    let quota = site.file("cpu", cgroup, "cpu.cfs_quota_us");
    until_true("the pod's cgroup follows", || text(&quota) == "50000").await;
    until_true("it is done", || is_settled(&agent, "web") && reasons(&events).len() == 2).await;
    assert_eq!(text(&site.file("memory", cgroup, "memory.limit_in_bytes")), (96 << 20).to_string());
    assert_eq!(site.applied("web"), [256, 25_000, 64 << 20], "the container keeps its own");
    assert_eq!(site.instances("web"), 1);
}

#[tokio::test(start_paused = true)]
async fn without_their_gate_the_status_has_no_resources_of_the_pod() {
    let policy = ResizePolicy { pod_level: false, ..ResizePolicy::default() };
    let site = ResizableNode { policy, ..ResizableNode::new(4000) };
    let (agent, ..) = site.start(vec![cpu("web", 1, "1")]);
    site.until_running("web").await;
    sleep(Duration::from_secs(1)).await;
    let of_pod = status(&agent, "web");
    assert_eq!((of_pod.resources, of_pod.allocated_resources), (None, None));
    let container = of_pod.container_statuses.expect("statuses").remove(0);
    assert_eq!(container.allocated_resources.expect("resources")["cpu"].0, "1");
}

#[tokio::test(start_paused = true)]
async fn a_container_that_waits_to_be_restarted_starts_with_its_new_resources() {
    let site = ResizableNode::new(4000);
    site.sim.script("web", "main", None, Program::from_command(&["run".to_owned()], 0).expect("a program"));
    let pod = |generation, memory: &str| sized("web", generation, both("500m", memory), json!({}));
    let (agent, ..) = site.start(vec![pod(1, "64Mi")]);
    site.until_running("web").await;
    // It crashes twice: the second time it waits.
    for count in 1..=2 {
        site.sim.kill("web", "main", Exit::Code(1)).expect("it runs");
        if count == 1 {
            until(&site.sim, "it was restarted", |trace| trace.history("web", "main").count() == 2).await;
            site.until_running("web").await;
        }
    }
    sleep(Duration::from_secs(1)).await;
    agent.update(pod(2, "128Mi")).await;
    let limit = site.file("memory", "kubepods/podweb-uid", "memory.limit_in_bytes");
    until_true("the pod's cgroup follows", || text(&limit) == (128 << 20).to_string()).await;
    until(&site.sim, "it was restarted", |trace| trace.history("web", "main").count() == 3).await;
    until_true("it has its resources", || site.applied("web")[2] == 128 << 20 && is_settled(&agent, "web")).await;
}
