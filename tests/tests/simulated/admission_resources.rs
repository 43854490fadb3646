//! Admission by what the node has left, on the whole agent: what pods hold and for how long, restarts of the agent,
//! preemption by critical pods, labels that change.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::core::v1::PodStatus;
use keblet::admission::NodeInfo;
use keblet::admission::NodeOffer;
use keblet::admission::Quantities;
use keblet::metrics::Metrics;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::recorder::Recorder;
use keblet::sync::ReadNode;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::recorder;
use keblet_tests::node::shortage::until_true;
use keblet_tests::node::until;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::sleep;

const LONG: Duration = Duration::from_secs(600);

/// A pod of the API server: its container's resources, and other fields of the spec.
fn bound(name: &str, program: &str, resources: Value, fields: Value) -> Pod {
    let built = pod(name).running("main", program).from_api().build();
    let mut object = serde_json::to_value(&*built).expect("a pod");
    object["spec"]["containers"][0]["resources"] = resources;
    object["spec"].as_object_mut().expect("a spec").extend(fields.as_object().expect("fields").clone());
    Arc::new(serde_json::from_value(object).expect("a pod"))
}

fn plain(name: &str) -> Pod {
    bound(name, "run", json!({}), json!({}))
}

fn requests(cpu: &str) -> Value {
    json!({ "requests": { "cpu": cpu } })
}

fn created(pod: Pod, second: i64) -> Pod {
    let mut pod = Arc::unwrap_or_clone(pod);
    let time = k8s_openapi::jiff::Timestamp::from_second(second).expect("a time");
    pod.metadata.creation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(time));
    Arc::new(pod)
}

/// A node for so many pods with so many thousandths of a CPU.
fn offer(pods: i64, milli_cpu: i64) -> NodeOffer {
    let allocatable = Quantities { pods, milli_cpu, ..Quantities::unlimited() };
    let node = NodeInfo { name: "sim".to_owned(), allocatable, ..NodeInfo::default() };
    NodeOffer { node: Some(Arc::new(node)), ..NodeOffer::default() }
}

fn start(sim: &SimRuntime, root: &Path, pods: Vec<Pod>, offer: NodeOffer) -> (Agent, Arc<Metrics>) {
    Agent::start_offering(sim, root, pods, Recorder::default(), (offer, None))
}

fn status(agent: &Agent, name: &str) -> PodStatus {
    agent.statuses.get(&PodUid::from(format!("{name}-uid"))).unwrap_or_default()
}

fn reason(agent: &Agent, name: &str) -> Option<String> {
    status(agent, name).reason
}

fn is_live(sim: &SimRuntime, name: &str) -> bool {
    sim.trace(|l| l.live(name, "main").is_some())
}

#[tokio::test(start_paused = true)]
async fn a_pod_too_many_is_rejected_and_leaves_nothing() {
    let (sim, folder) = node();
    // The oldest ones are decided on first, whatever the order of the list.
    let pods = vec![created(plain("third"), 3), created(plain("first"), 1), created(plain("second"), 2)];
    let (agent, metrics) = start(&sim, folder.path(), pods, offer(2, 1000));
    until(&sim, "two run", |l| l.live_count() == 2).await;
    until_true("the third is rejected", || reason(&agent, "third").is_some()).await;
    let rejected = status(&agent, "third");
    assert_eq!((rejected.phase.as_deref(), rejected.reason.as_deref()), (Some("Failed"), Some("OutOfpods")));
    let message = "Pod was rejected: Node didn't have enough resource: pods, requested: 1, used: 2, capacity: 2";
    assert_eq!(rejected.message.as_deref(), Some(message));
    assert!(rejected.container_statuses.is_none() && rejected.conditions.is_none(), "{rejected:?}");
    sleep(LONG).await;
    assert!(!folder.path().join("pods/third-uid").exists(), "no folder and no volume");
    let sandboxes = sim.trace(|l| l.calls().filter(|call| call.method == Method::RunPodSandbox).count());
    assert_eq!(sandboxes, 2, "{}", sim.trace(Trace::to_string));
    let text = metrics.render().expect("metrics");
    assert!(text.contains("kubelet_admission_rejections_total{reason=\"OutOfpods\"} 1"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn what_a_pod_holds_is_free_when_its_containers_have_ended() {
    let (sim, folder) = node();
    let port = |name: &str, program: &str| {
        let ports = json!([{ "containerPort": 80, "hostPort": 80 }]);
        let container = json!({ "name": "main", "image": "busybox", "imagePullPolicy": "IfNotPresent",
            "command": program.split(' ').collect::<Vec<_>>(), "ports": ports, "resources": requests("600m") });
        bound(name, program, json!({}), json!({ "containers": [container], "restartPolicy": "Never" }))
    };
    let (agent, _) = start(&sim, folder.path(), vec![port("old", "term ignore")], offer(10, 1000));
    until(&sim, "it runs", |l| l.live("old", "main").is_some()).await;
    agent.add(port("early", "run")).await;
    agent.add(bound("cpu", "run", requests("500m"), json!({}))).await;
    until_true("both are rejected", || reason(&agent, "cpu").is_some()).await;
    assert_eq!(reason(&agent, "early").as_deref(), Some("OutOfcpu"), "the first of two reasons");
    let message = "Pod was rejected: Node didn't have enough resource: cpu, requested: 500, used: 600, capacity: 1000";
    assert_eq!(status(&agent, "cpu").message.as_deref(), Some(message));
    // A pod of the API server that is being deleted holds its resources until its containers have ended.
    let mut deleting = ApiPod::clone(&port("old", "term ignore"));
    deleting.metadata = pod("old").from_api().deleting().build().metadata.clone();
    agent.update(Arc::new(deleting)).await;
    sleep(Duration::from_secs(2)).await;
    assert!(is_live(&sim, "old"));
    agent.add(bound("during", "run", requests("500m"), json!({}))).await;
    until_true("rejected", || reason(&agent, "during").is_some()).await;
    until(&sim, "it has ended", |l| l.live("old", "main").is_none()).await;
    sleep(Duration::from_secs(5)).await;
    agent.add(port("late", "run")).await;
    until(&sim, "the next one runs", |l| l.live("late", "main").is_some()).await;
    sleep(LONG).await;
    assert_eq!(sim.trace(Trace::live_count), 1, "a rejected pod stays rejected");
}

#[tokio::test(start_paused = true)]
async fn a_host_port_is_given_once() {
    let (sim, folder) = node();
    let port = |name: &str| {
        let built = bound(name, "run", json!({}), json!({}));
        let mut object = serde_json::to_value(&*built).expect("a pod");
        object["spec"]["containers"][0]["ports"] = json!([{ "containerPort": 80, "hostPort": 80 }]);
        Arc::new(serde_json::from_value::<ApiPod>(object).expect("a pod"))
    };
    let (agent, metrics) = start(&sim, folder.path(), vec![port("a"), port("b")], offer(10, 1000));
    until_true("one is rejected", || reason(&agent, "b").is_some()).await;
    let message =
        "Pod was rejected: Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
    assert_eq!(status(&agent, "b").message.as_deref(), Some(message));
    until(&sim, "the other runs", |l| l.live("a", "main").is_some()).await;
    let text = metrics.render().expect("metrics");
    assert!(text.contains("kubelet_admission_rejections_total{reason=\"Other\"} 1"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn running_pods_stay_admitted_when_the_agent_restarts_on_a_smaller_node() {
    let (sim, folder) = node();
    let both = || vec![created(plain("a"), 5), created(bound("b", "run", requests("900m"), json!({})), 6)];
    let (agent, _) = start(&sim, folder.path(), both(), offer(10, 1000));
    until(&sim, "both run", |l| l.live_count() == 2).await;
    sleep(Duration::from_secs(2)).await;
    drop(agent);
    // The new pod is older than those that run, and first in the list.
    let mut pods = vec![created(bound("new", "run", requests("200m"), json!({})), 1)];
    pods.extend(both());
    let (agent, _) = start(&sim, folder.path(), pods, offer(2, 100));
    until_true("the new pod is rejected", || reason(&agent, "new").is_some()).await;
    let message = "Pod was rejected: Node didn't have enough resource: pods, requested: 1, used: 2, capacity: 2";
    assert_eq!(status(&agent, "new").message.as_deref(), Some(message));
    sleep(LONG).await;
    assert!(is_live(&sim, "a") && is_live(&sim, "b"), "{}", sim.trace(Trace::to_string));
    for name in ["a", "b"] {
        assert_eq!(sim.trace(|l| l.history(name, "main").count()), 1, "{name} was not restarted");
        assert_eq!(status(&agent, name).phase.as_deref(), Some("Running"));
    }
}

#[tokio::test(start_paused = true)]
async fn new_pods_of_the_api_server_are_decided_on_after_the_static_ones() {
    let (sim, folder) = node();
    let fixed = || pod("static").running("main", "run").build();
    let (agent, _) = start(&sim, folder.path(), vec![fixed()], offer(10, 1000));
    until(&sim, "the static pod runs", |l| l.live("static", "main").is_some()).await;
    drop(agent);
    std::fs::create_dir(folder.path().join("manifests")).expect("a folder");
    let agent = Agent::start_before_static_pods(&sim, folder.path(), vec![plain("new")], offer(1, 1000));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(status(&agent, "new").phase, None, "not decided on");
    agent.add(fixed()).await;
    until_true("the new pod is rejected", || reason(&agent, "new").is_some()).await;
    let message = "Pod was rejected: Node didn't have enough resource: pods, requested: 1, used: 1, capacity: 1";
    assert_eq!(status(&agent, "new").message.as_deref(), Some(message));
    assert!(is_live(&sim, "static") && sim.trace(|l| l.history("static", "main").count()) == 1);
}

#[tokio::test(start_paused = true)]
async fn a_source_of_static_pods_that_delivers_nothing_delays_new_pods_two_seconds() {
    let (sim, folder) = node();
    let begin = Instant::now();
    let _agent = Agent::start_before_static_pods(&sim, folder.path(), vec![plain("new")], offer(1, 1000));
    until(&sim, "it runs", |l| l.live("new", "main").is_some()).await;
    assert!((Duration::from_secs(2)..Duration::from_secs(4)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_critical_pod_starts_when_the_pods_that_it_preempts_have_ended() {
    let (sim, folder) = node();
    let (recorder, events) = recorder();
    let pods = vec![
        bound("burstable", "term ignore", requests("300m"), json!({ "terminationGracePeriodSeconds": 20 })),
        bound("other", "run", requests("600m"), json!({})),
        plain("best-effort"),
    ];
    let (agent, metrics) = Agent::start_offering(&sim, folder.path(), pods, recorder, (offer(10, 1000), None));
    until(&sim, "all run", |l| l.live_count() == 3).await;
    let critical = |name: &str, cpu: &str| bound(name, "run", requests(cpu), json!({ "priority": 2_000_000_000 }));
    let begin = Instant::now();
    agent.add(critical("critical", "350m")).await;
    sleep(Duration::from_secs(1)).await;
    // What the victim holds is promised to the critical pod.
    agent.add(bound("late", "run", requests("100m"), json!({}))).await;
    until_true("the other is rejected", || reason(&agent, "late").is_some()).await;
    sleep(Duration::from_secs(10)).await;
    assert!(is_live(&sim, "burstable") && !is_live(&sim, "critical"), "its own grace period is 20 s");
    until(&sim, "the critical pod runs", |l| l.live("critical", "main").is_some()).await;
    assert!((Duration::from_secs(20)..Duration::from_secs(25)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    assert!(!is_live(&sim, "burstable") && is_live(&sim, "other") && is_live(&sim, "best-effort"));

    let victim = status(&agent, "burstable");
    assert_eq!((victim.phase.as_deref(), victim.reason.as_deref()), (Some("Failed"), Some("Preempting")));
    assert_eq!(victim.message.as_deref(), Some("Preempted in order to admit critical pod"));
    let disruption = victim.conditions.iter().flatten().find(|c| c.type_ == "DisruptionTarget").expect("a condition");
    assert_eq!((disruption.status.as_str(), disruption.reason.as_deref()), ("True", Some("TerminationByKubelet")));
    let message = "Pod was preempted by Kubelet to accommodate a critical pod.";
    assert_eq!(disruption.message.as_deref(), Some(message));
    let events = events.lock().expect("not poisoned").clone();
    let preempting = events.iter().filter(|(_, event)| event["reason"] == "Preempting");
    let about: Vec<&Value> = preempting.map(|(_, event)| &event["involvedObject"]["name"]).collect();
    assert_eq!(about, ["burstable"]);
    let text = metrics.render().expect("metrics");
    assert!(text.contains("kubelet_preemptions{preemption_signal=\"cpu\"} 1"), "{text}");

    // Not even all of the others have that much.
    agent.add(critical("huge", "2")).await;
    until_true("it is rejected", || reason(&agent, "huge").is_some()).await;
    let message = "Pod was rejected: Unexpected error while attempting to recover from admission failure: preemption: error \
                   finding a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: 1350), ]";
    assert_eq!(status(&agent, "huge").message.as_deref(), Some(message));
    sleep(LONG).await;
    assert_eq!(sim.trace(Trace::live_count), 3, "nothing else was evicted");
}

/// What they have left is removed meanwhile.
#[tokio::test(start_paused = true)]
async fn a_critical_pod_starts_when_the_processes_of_its_victims_have_ended() {
    let (sim, folder) = node();
    let (agent, _) = start(&sim, folder.path(), vec![bound("web", "run", requests("1"), json!({}))], offer(10, 1000));
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    sleep(Duration::from_secs(5)).await;
    let slow = FaultKind::Slow(Duration::from_secs(60));
    sim.faults(|faults| faults.add(CallFault::on(Method::StopPodSandbox, slow).about("web")));
    let begin = Instant::now();
    agent.add(bound("critical", "run", requests("1"), json!({ "priority": 2_000_000_000 }))).await;
    until(&sim, "the critical pod runs", |l| l.live("critical", "main").is_some()).await;
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert!(!is_live(&sim, "web"));
}

#[tokio::test(start_paused = true)]
async fn two_critical_pods_do_not_count_on_the_same_victim() {
    let (sim, folder) = node();
    let pods = vec![
        bound("a", "term ignore", requests("500m"), json!({})),
        bound("b", "term ignore", requests("500m"), json!({})),
    ];
    let (agent, _) = start(&sim, folder.path(), pods, offer(10, 1000));
    until(&sim, "both run", |l| l.live_count() == 2).await;
    for name in ["first", "second"] {
        agent.add(bound(name, "run", requests("500m"), json!({ "priority": 2_000_000_000 }))).await;
    }
    until(&sim, "both critical pods run", |l| l.live("first", "main").is_some() && l.live("second", "main").is_some())
        .await;
    assert!(!is_live(&sim, "a") && !is_live(&sim, "b"));
}

#[tokio::test(start_paused = true)]
async fn a_critical_pod_that_is_removed_while_it_waits_never_starts() {
    let (sim, folder) = node();
    let pods = vec![bound("web", "term ignore", requests("1"), json!({ "terminationGracePeriodSeconds": 20 }))];
    let (agent, _) = start(&sim, folder.path(), pods, offer(10, 1000));
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    let critical = bound("critical", "run", requests("1"), json!({ "priority": 2_000_000_000 }));
    agent.add(critical.clone()).await;
    sleep(Duration::from_secs(5)).await;
    agent.remove(critical).await;
    until(&sim, "the victim has ended", |l| l.live_count() == 0).await;
    sleep(LONG).await;
    assert_eq!(sim.trace(|l| l.history("critical", "main").count()), 0, "{}", sim.trace(Trace::to_string));
    assert_eq!(status(&agent, "web").reason.as_deref(), Some("Preempting"));
}

#[tokio::test(start_paused = true)]
async fn a_critical_pod_whose_victims_end_while_the_node_shuts_down_is_rejected() {
    let (sim, folder) = node();
    let pods = vec![bound("web", "term ignore", requests("1"), json!({ "terminationGracePeriodSeconds": 20 }))];
    let (agent, _) = start(&sim, folder.path(), pods, offer(10, 1000));
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    agent.add(bound("critical", "run", requests("1"), json!({ "priority": 2_000_000_000 }))).await;
    sleep(Duration::from_secs(5)).await;
    agent.close();
    until_true("it is rejected", || reason(&agent, "critical").as_deref() == Some("NodeShutdown")).await;
    assert!(!is_live(&sim, "web"));
    sleep(LONG).await;
    assert_eq!(sim.trace(|l| l.history("critical", "main").count()), 0, "{}", sim.trace(Trace::to_string));
}

/// The Node that was read for a pod before it was removed says nothing of what the pod waits for now.
#[tokio::test(start_paused = true)]
async fn a_pod_that_comes_back_waits_for_its_victims_whatever_it_has_waited_for_before() {
    let (sim, folder) = node();
    let never: ReadNode = Arc::new(|| Box::pin(std::future::pending()));
    let web = bound("web", "term ignore", requests("1"), json!({ "terminationGracePeriodSeconds": 30 }));
    let offered = (offer(10, 1000), Some(never));
    let (agent, _) = Agent::start_offering(&sim, folder.path(), vec![web], Recorder::default(), offered);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    let before = bound("critical", "run", json!({}), json!({ "nodeSelector": { "zone": "a" } }));
    agent.add(before.clone()).await;
    sleep(Duration::from_secs(2)).await;
    agent.remove(before).await;
    sleep(Duration::from_secs(2)).await;
    agent.add(bound("critical", "run", requests("1"), json!({ "priority": 2_000_000_000 }))).await;
    sleep(Duration::from_secs(8)).await;
    // Housekeeping starts pods that wait for nothing.
    agent.add(plain("other")).await;
    agent.remove(plain("other")).await;
    sleep(Duration::from_secs(2)).await;
    assert!(is_live(&sim, "web") && !is_live(&sim, "critical"), "{}", sim.trace(Trace::to_string));
    until(&sim, "the critical pod runs", |l| l.live("critical", "main").is_some()).await;
    assert!(!is_live(&sim, "web"));
}

/// The end of those that were evicted for it before it was removed starts nothing.
#[tokio::test(start_paused = true)]
async fn a_critical_pod_that_comes_back_waits_for_the_victims_of_its_new_life() {
    let (sim, folder) = node();
    let victim =
        |name: &str| bound(name, "term ignore", requests("500m"), json!({ "terminationGracePeriodSeconds": 20 }));
    let (agent, _) = start(&sim, folder.path(), vec![victim("a"), victim("b")], offer(10, 1000));
    until(&sim, "both run", |l| l.live_count() == 2).await;
    let critical = |cpu: &str| bound("critical", "run", requests(cpu), json!({ "priority": 2_000_000_000 }));
    agent.add(critical("500m")).await;
    sleep(Duration::from_secs(5)).await;
    agent.remove(critical("500m")).await;
    sleep(Duration::from_secs(5)).await;
    agent.add(critical("1")).await;
    until(&sim, "the first victim has ended", |l| l.live_count() == 1).await;
    until(&sim, "the critical pod runs", |l| l.live("critical", "main").is_some()).await;
    assert!(!is_live(&sim, "a") && !is_live(&sim, "b"), "{}", sim.trace(Trace::to_string));
}

/// Another kubelet has started it, and this agent does not support all of it.
#[tokio::test(start_paused = true)]
async fn an_unmanaged_pod_is_not_preempted() {
    let (sim, folder) = node();
    let web = |fields: Value| bound("web", "run", requests("600m"), fields);
    let (agent, _) = start(&sim, folder.path(), vec![web(json!({}))], offer(10, 1000));
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    sleep(Duration::from_secs(2)).await;
    drop(agent);
    let unsupported = web(json!({ "resourceClaims": [{ "name": "gpu", "resourceClaimName": "gpu" }] }));
    let (agent, _) = start(&sim, folder.path(), vec![unsupported], offer(10, 1000));
    sleep(Duration::from_secs(5)).await;
    agent.add(bound("critical", "run", requests("600m"), json!({ "priority": 2_000_000_000 }))).await;
    until_true("the critical pod is rejected", || reason(&agent, "critical").is_some()).await;
    sleep(LONG).await;
    assert!(is_live(&sim, "web") && !is_live(&sim, "critical"), "{}", sim.trace(Trace::to_string));
}

/// Answers with a Node that has this label.
fn node_with(key: &'static str) -> ReadNode {
    Arc::new(move || {
        let mut node = Node::default();
        node.metadata.name = Some("sim".to_owned());
        node.metadata.labels = Some([(key.to_owned(), "a".to_owned())].into());
        Box::pin(async move { Some(Arc::new(node)) })
    })
}

#[tokio::test(start_paused = true)]
async fn labels_are_read_once_more_before_a_pod_is_rejected_for_them() {
    let selects = || bound("web", "run", json!({}), json!({ "nodeSelector": { "zone": "a" } }));
    let never: ReadNode = Arc::new(|| Box::pin(std::future::pending()));
    let message = "Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector";
    for (read, admitted) in
        [(Some(node_with("zone")), true), (Some(node_with("other")), false), (Some(never), false), (None, false)]
    {
        let (sim, folder) = node();
        let pods = vec![selects()];
        let (agent, _) = Agent::start_offering(&sim, folder.path(), pods, Recorder::default(), (offer(10, 1000), read));
        if admitted {
            until(&sim, "it runs", |l| l.live_count() == 1).await;
        } else {
            until_true("it is rejected", || reason(&agent, "web").is_some()).await;
            assert_eq!(status(&agent, "web").message.as_deref(), Some(message));
        }
    }
}
