//! Evictions requested from the agent.

use std::time::Duration;

use keblet::model::PodUid;
use keblet::status::TerminationReason;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

const SOON: Duration = Duration::from_secs(60);
const MESSAGE: &str = "The node was low on resource: memory.";

fn low_on_memory() -> TerminationReason {
    TerminationReason { reason: "Evicted", message: MESSAGE.to_owned(), disruption: Some(MESSAGE.to_owned()) }
}

#[tokio::test(start_paused = true)]
async fn an_evicted_pod_fails_with_the_reason_of_its_eviction() {
    let ((sim, folder), api) = (node(), Api::default());
    let mut web = pod("web").own_network().running("main", "term ignore").from_api().build().as_ref().clone();
    web.spec.as_mut().expect("a spec").termination_grace_period_seconds = Some(40);
    let web = api.put(&web.into());
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    let runs = |l: &Trace| l.live("web", "main").is_some();
    sim.until("it runs", SOON, runs).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sleep(Duration::from_secs(10)).await;

    let (uid, finished, since) = (PodUid::from("web-uid"), CancellationToken::new(), Instant::now());
    agent.evictions.evict(uid.clone(), low_on_memory(), Some(3), finished.clone()).await.expect("the agent runs");
    finished.cancelled().await;

    let exited = sim.trace(|l| l.history("web", "main").find_map(|i| i.exited.as_ref().map(|(at, _)| *at)));
    let took = exited.expect("it has exited").duration_since(since);
    assert!(took >= Duration::from_secs(3) && took < Duration::from_secs(4), "the grace of the eviction: {took:?}");
    sleep(Duration::from_secs(5)).await;
    let status = api.pod("web").and_then(|pod| pod.status.clone()).expect("a status");
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    assert_eq!((status.reason.as_deref(), status.message.as_deref()), (Some("Evicted"), Some(MESSAGE)));
    let disrupted = status.conditions.iter().flatten().find(|condition| condition.type_ == "DisruptionTarget");
    assert_eq!(disrupted.map(|condition| condition.status.as_str()), Some("True"));
    assert_eq!(api.phases_sent("web").iter().filter(|phase| *phase == "Failed").count(), 1, "it is sent once");
    assert!(api.deleted().is_empty(), "the object stays");
    assert_eq!(sim.sandboxes("web").len(), 0, "the containers of an evicted pod are removed");
    sleep(Duration::from_secs(600)).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "it is not started again");
}

/// A process that handles SIGTERM and exits with 0 has succeeded, as with a kubelet. Why it ended is in the status all the same.
#[tokio::test(start_paused = true)]
async fn an_evicted_pod_that_exits_with_0_succeeds_and_keeps_the_reason_of_its_eviction() {
    let ((sim, folder), api) = (node(), Api::default());
    for (name, network) in [("own", true), ("host", false)] {
        let pod = pod(name).running("main", "term 20ms").from_api();
        let pod = if network { pod.own_network() } else { pod }.build().as_ref().clone();
        api.put(&pod.into());
    }
    let pods = ["own", "host"].map(|name| api.pod(name).expect("it exists")).to_vec();
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), pods, &api);
    sim.until("both run", SOON, |l| l.live_count() == 2).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sleep(Duration::from_secs(10)).await;
    for name in ["own", "host"] {
        let (uid, finished) = (PodUid::from(format!("{name}-uid")), CancellationToken::new());
        agent.evictions.evict(uid, low_on_memory(), Some(3), finished.clone()).await.expect("the agent runs");
        finished.cancelled().await;
    }
    sleep(Duration::from_secs(5)).await;
    for name in ["own", "host"] {
        let status = api.pod(name).and_then(|pod| pod.status.clone()).expect("a status");
        assert_eq!(status.phase.as_deref(), Some("Succeeded"), "{name}");
        assert_eq!((status.reason.as_deref(), status.message.as_deref()), (Some("Evicted"), Some(MESSAGE)), "{name}");
        let disrupted = status.conditions.iter().flatten().find(|condition| condition.type_ == "DisruptionTarget");
        assert_eq!(disrupted.map(|condition| condition.status.as_str()), Some("True"), "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_eviction_of_an_unknown_pod_is_finished_at_once() {
    let (sim, folder) = node();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), Vec::new());
    let finished = CancellationToken::new();
    let sent = agent.evictions.evict(PodUid::from("unknown"), low_on_memory(), None, finished.clone()).await;
    sent.expect("the agent runs");
    tokio::time::timeout(SOON, finished.cancelled()).await.expect("there is nothing to wait for");
}
