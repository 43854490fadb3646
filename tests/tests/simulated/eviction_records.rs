//! Evictions and preemptions that an agent has decided on and a later one finishes: their records.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use keblet::admission::NodeInfo;
use keblet::admission::NodeOffer;
use keblet::admission::Quantities;
use keblet::config::eviction::Signal;
use keblet::model::Pod;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::shortage::*;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::sleep;

/// The pod `web` of an API server to which its eviction was not reported.
fn unpublished(api: &Api) -> Pod {
    let known = api.pod("web").expect("it is there");
    assert_eq!(reason(known.status.as_ref()), None, "the eviction is not published");
    known
}

/// The agent is killed before the API server is back: the next one reports the eviction, and does not start the pod again,
/// whether it knows the pod at once or late.
#[tokio::test(start_paused = true)]
async fn an_eviction_that_a_killed_agent_has_not_reported_is_reported_by_the_next_one() {
    for late in [false, true] {
        let mut web = WebNode::start("run").await;
        let _manager = web.evict_unreported().await;
        let WebNode { sim, folder, api, shown, agent } = web;
        sleep(secs(60)).await;
        drop(agent);
        api.set_unavailable(false);
        let known = unpublished(&api);

        let (first, then) = if late { (Vec::new(), Some(known)) } else { (vec![known], None) };
        let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), first, &api);
        let _manager = agent.evict_by(hard_memory(), shown.clone());
        if let Some(known) = then {
            sleep(secs(40)).await;
            agent.add(known).await;
        }
        let stored = || api.pod("web").and_then(|pod| pod.status.clone());
        until_true("the API server knows", || reason(stored().as_ref()) == Some("Evicted")).await;
        sleep(secs(60)).await;
        assert_eq!(sim.trace(|l| (l.live_count(), l.history("web", "main").count())), (0, 1), "late: {late}");
        let recorded = || std::fs::read_to_string(folder.path().join("evictions.json")).expect("a file");
        assert!(recorded().contains("web-uid"), "the next agent may still be given the pod without its end");
        agent.reconcile(api.pod("web").expect("it is there")).await;
        sleep(secs(20)).await;
        assert_eq!(recorded(), "[]", "late: {late}");
    }
}

/// The API server is away for longer than the record of an eviction counts, before the agent is killed and after the next
/// one was started, which is killed too. The pod is delivered to the last one at once.
#[tokio::test(start_paused = true)]
async fn an_eviction_is_reported_however_long_the_api_server_is_away() {
    let mut web = WebNode::start("run").await;
    let _manager = web.evict_unreported().await;
    let WebNode { sim, folder, api, shown, agent } = web;
    sleep(secs(1800)).await;
    drop(agent);

    // Its sources deliver nothing while the API server is away.
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), Vec::new(), &api);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    sleep(secs(1800)).await;
    drop(agent);

    api.set_unavailable(false);
    let known = unpublished(&api);
    // Longer than a container needs to start: the pod is delivered during the first pass of the eviction manager.
    shown.state().reading_takes = secs(5);
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), Vec::new(), &api);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    agent.add(known).await;
    let stored = || api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(stored().as_ref()) == Some("Evicted")).await;
    sleep(secs(60)).await;
    assert_eq!(sim.trace(|l| (l.live_count(), l.history("web", "main").count())), (0, 1));
}

/// A critical pod has taken the room of another, whose end the API server does not know when the agent is killed: the next
/// agent reports that end, and does not start the pod beside the critical one.
#[tokio::test(start_paused = true)]
async fn a_preempted_pod_that_a_killed_agent_has_not_reported_is_reported_by_the_next_one() {
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    shown.set_available(Signal::MemoryAvailable, 500);
    let allocatable = Quantities { memory: 1000, ..Quantities::unlimited() };
    let offered = NodeInfo { name: "sim".to_owned(), allocatable, ..NodeInfo::default() };
    let offer = NodeOffer { node: Some(Arc::new(offered)), ..NodeOffer::default() };
    let web = api.put(&requesting("web", "run", Some("600")));
    let mut critical = Arc::unwrap_or_clone(requesting("critical", "run", Some("600")));
    critical.spec.as_mut().expect("a spec").priority = Some(2_000_000_000);

    let mut agent = Agent::start_in_full_cluster(&sim, folder.path(), vec![web], offer.clone(), &api);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    sleep(secs(5)).await;
    api.set_unavailable(true);
    agent.add(api.put(&Arc::new(critical))).await;
    until(&sim, "the critical pod runs", |l| l.live("critical", "main").is_some()).await;
    sleep(secs(1800)).await;
    drop(agent);
    api.set_unavailable(false);

    let pods = vec![unpublished(&api), api.pod("critical").expect("it is there")];
    let mut agent = Agent::start_in_full_cluster(&sim, folder.path(), pods, offer, &api);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    let stored = || api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(stored().as_ref()) == Some("Preempting")).await;
    let status = stored().expect("a status");
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    assert!(status.conditions.iter().flatten().any(|condition| condition.type_ == "DisruptionTarget"));
    sleep(secs(60)).await;
    assert_eq!(sim.trace(|l| (l.live_count(), l.history("web", "main").count())), (1, 1));
    assert!(sim.trace(|l| l.live("critical", "main").is_some()), "{}", sim.trace(Trace::to_string));
    agent.reconcile(api.pod("web").expect("it is there")).await;
    sleep(secs(20)).await;
    assert_eq!(std::fs::read_to_string(folder.path().join("evictions.json")).expect("a file"), "[]");
}

/// A pod whose eviction was not finished, and that no source has any more, is awaited for ten minutes after all sources have
/// delivered their pods.
#[tokio::test(start_paused = true)]
async fn an_unfinished_eviction_of_a_pod_that_is_gone_is_forgotten() {
    let (sim, folder) = node();
    let shown = Shown::default();
    decided_now(&sim, folder.path());
    let mut agent = Agent::start_before_static_pods(&sim, folder.path(), Vec::new(), NodeOffer::unlimited());
    shown.set_available(Signal::MemoryAvailable, 500);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    let recorded = || std::fs::read_to_string(folder.path().join("evictions.json")).expect("a file");
    sleep(secs(700)).await;
    assert!(recorded().contains("web-uid"), "static pods were not delivered yet");
    agent.add(pod("static").running("main", "run").build()).await;
    sleep(secs(560)).await;
    assert!(recorded().contains("web-uid"), "it may still be created");
    sleep(secs(80)).await;
    assert_eq!(recorded(), "[]");
}

/// The agent is killed after its decision, before the pod has ended: the next one ends it, and its status says why.
#[tokio::test(start_paused = true)]
async fn an_agent_killed_during_an_eviction_finishes_it_when_it_is_started_again() {
    keep_events();
    let WebNode { sim, folder, api, shown, mut agent } = WebNode::start("term ignore").await;
    shown.set_available(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    until(&sim, "the agent stops it", |l| l.count(Method::StopContainer) > 0).await;
    drop(agent);
    shown.set_available(Signal::MemoryAvailable, 500);
    sleep(secs(10)).await;
    let known = unpublished(&api);

    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![known], &api);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    let stored = || api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(stored().as_ref()) == Some("Evicted")).await;
    until(&sim, "nothing runs", |l| l.live_count() == 0).await;
    sleep(secs(700)).await;
    assert_eq!(sim.trace(Trace::live_count), 0);
    assert_eq!(events("Evicted"), 1);
}

/// The eviction cannot be recorded: it is carried out and reported all the same.
#[tokio::test(start_paused = true)]
async fn an_eviction_on_a_full_disk_is_carried_out() {
    let WebNode { sim, folder, api, shown, mut agent } = WebNode::start("run").await;
    // Every write to it fails with ENOSPC.
    symlink("/dev/full", folder.path().join("evictions.partial")).expect("a link");
    shown.set_available(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    let stored = || api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(stored().as_ref()) == Some("Evicted")).await;
    until(&sim, "nothing runs", |l| l.live_count() == 0).await;
    let recorded = std::fs::read_to_string(folder.path().join("evictions.json")).unwrap_or_default();
    assert!(!recorded.contains("web-uid"), "the disk was not full: {recorded}");
}

/// Records the eviction of the pod `web` in the folder of an agent, and returns when it was decided.
fn decided_now(sim: &SimRuntime, folder: &Path) -> i64 {
    let now = sim.clock().wall(Instant::now()).duration_since(SystemTime::UNIX_EPOCH).expect("after the epoch");
    let now = i64::try_from(now.as_nanos()).expect("before 2262");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let message = "The node was low on resource: memory. ";
    let entry = json!([{
        "uid": "web-uid", "grace": 1, "message": message, "disruption": true, "decidedAt": now, "bootId": boot.trim(),
    }]);
    std::fs::write(folder.join("evictions.json"), entry.to_string()).expect("written");
    now
}

/// The agent is killed after its decision, and another kubelet continues to run the pod, or the next agent starts much
/// later: the pod is healthy, and stays.
#[tokio::test(start_paused = true)]
async fn a_decision_that_is_out_of_date_evicts_no_pod() {
    for (pause, restarted) in [(700, false), (60, true)] {
        let WebNode { sim, folder, api, shown, agent } = WebNode::start("run").await;
        drop(agent);
        let decided_at = decided_now(&sim, folder.path());
        if restarted {
            shown.state().created.insert(uid("web"), vec![decided_at - 1, decided_at + 31_000_000_000]);
        }
        sleep(secs(pause)).await;
        let known = api.pod("web").expect("it is there");
        let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![known], &api);
        shown.set_available(Signal::MemoryAvailable, 500);
        let _manager = agent.evict_by(hard_memory(), shown.clone());
        sleep(secs(60)).await;
        assert_eq!(sim.trace(Trace::live_count), 1, "restarted: {restarted}");
        assert_eq!(std::fs::read_to_string(folder.path().join("evictions.json")).expect("a file"), "[]");
    }
}

/// The agent is killed when its decision is recorded and nothing is done to the pod yet: the next one evicts it, once.
#[tokio::test(start_paused = true)]
async fn a_decision_of_a_killed_agent_is_carried_out_once() {
    keep_events();
    let WebNode { sim, folder, api, shown, agent } = WebNode::start("run").await;
    drop(agent);
    decided_now(&sim, folder.path());

    let known = api.pod("web").expect("it is there");
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![known], &api);
    shown.set_available(Signal::MemoryAvailable, 500);
    let (_wake, metrics) = agent.evict_by(hard_memory(), shown.clone());
    let stored = || api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(stored().as_ref()) == Some("Evicted")).await;
    let message = stored().and_then(|status| status.message);
    assert_eq!(message.as_deref(), Some("The node was low on resource: memory. "));
    until(&sim, "nothing runs", |l| l.live_count() == 0).await;
    sleep(secs(700)).await;
    assert_eq!((sim.trace(Trace::live_count), sim.trace(|l| l.history("web", "main").count())), (0, 1));
    agent.reconcile(api.pod("web").expect("it is there")).await;
    sleep(secs(20)).await;
    assert_eq!(std::fs::read_to_string(folder.path().join("evictions.json")).expect("a file"), "[]");
    let text = metrics.render().expect("metrics");
    assert!(!text.contains("kubelet_evictions{"), "the agent that decided has counted it: {text}");
}
