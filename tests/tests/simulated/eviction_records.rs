//! Evictions that an agent has decided on and a later one finishes: their records.

use std::path::Path;
use std::time::SystemTime;

use keblet::admission::NodeOffer;
use keblet::config::eviction::Signal;
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

/// The agent is killed before the API server is back: the next one reports the eviction, and does not start the pod again,
/// whether it knows the pod at once or late.
#[tokio::test(start_paused = true)]
async fn an_eviction_that_a_killed_agent_has_not_reported_is_reported_by_the_next_one() {
    for late in [false, true] {
        let (sim, folder) = node();
        let (api, shown) = (Api::default(), Shown::default());
        let web = api.put(&requesting("web", "run", None));
        let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
        until(&sim, "it runs", |l| l.live_count() == 1).await;
        sleep(secs(5)).await;
        api.set_unavailable(true);
        shown.set_available(Signal::MemoryAvailable, 50);
        let _manager = agent.evict_by(hard_memory(), shown.clone());
        until(&sim, "it has ended", |l| l.live_count() == 0).await;
        shown.set_available(Signal::MemoryAvailable, 500);
        sleep(secs(60)).await;
        drop(agent);
        api.set_unavailable(false);
        let known = api.pod("web").expect("it is there");
        assert_eq!(reason(known.status.as_ref()), None, "the eviction is not published");

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
/// one was started, which is killed too.
#[tokio::test(start_paused = true)]
async fn an_eviction_is_reported_however_long_the_api_server_is_away() {
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    let web = api.put(&requesting("web", "run", None));
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    sleep(secs(5)).await;
    api.set_unavailable(true);
    shown.set_available(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    until(&sim, "it has ended", |l| l.live_count() == 0).await;
    shown.set_available(Signal::MemoryAvailable, 500);
    sleep(secs(1800)).await;
    drop(agent);

    // Its sources deliver nothing while the API server is away.
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), Vec::new(), &api);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    sleep(secs(1800)).await;
    drop(agent);

    api.set_unavailable(false);
    let known = api.pod("web").expect("it is there");
    assert_eq!(reason(known.status.as_ref()), None, "the eviction is not published");
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), Vec::new(), &api);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    sleep(secs(5)).await;
    agent.add(known).await;
    let stored = || api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(stored().as_ref()) == Some("Evicted")).await;
    sleep(secs(60)).await;
    assert_eq!(sim.trace(|l| (l.live_count(), l.history("web", "main").count())), (0, 1));
}

/// A pod whose eviction was not finished, and that no source has any more, is awaited for ten minutes after all sources have
/// delivered their pods.
#[tokio::test(start_paused = true)]
async fn an_unfinished_eviction_of_a_pod_that_is_gone_is_forgotten() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut agent = Agent::start_before_static_pods(&sim, folder.path(), Vec::new(), NodeOffer::unlimited());
    decided_now(&sim, folder.path());
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
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    let web = api.put(&requesting("web", "term ignore", None));
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    sleep(secs(5)).await;
    shown.set_available(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    until(&sim, "told to end", |l| l.count(Method::StopContainer) > 0).await;
    drop(agent);
    shown.set_available(Signal::MemoryAvailable, 500);
    sleep(secs(10)).await;
    let known = api.pod("web").expect("it is there");
    assert_eq!(reason(known.status.as_ref()), None, "the eviction is not published");

    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![known], &api);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    let stored = || api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(stored().as_ref()) == Some("Evicted")).await;
    until(&sim, "nothing runs", |l| l.live_count() == 0).await;
    sleep(secs(700)).await;
    assert_eq!(sim.trace(Trace::live_count), 0);
    assert_eq!(events("Evicted"), 1);
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

/// The agent is killed after its decision, and another kubelet runs the pod on, or the next agent comes much later: the pod is
/// healthy, and stays.
#[tokio::test(start_paused = true)]
async fn a_decision_that_is_out_of_date_evicts_no_pod() {
    for (pause, restarted) in [(700, false), (60, true)] {
        let (sim, folder) = node();
        let (api, shown) = (Api::default(), Shown::default());
        let web = api.put(&requesting("web", "run", None));
        let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
        until(&sim, "it runs", |l| l.live_count() == 1).await;
        sleep(secs(5)).await;
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
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    let web = api.put(&requesting("web", "run", None));
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    sleep(secs(5)).await;
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
