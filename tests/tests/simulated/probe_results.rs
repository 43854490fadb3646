//! Probe results published to the agent act at once: no relist and no periodic sync is waited for.

use std::time::Duration;

use k8s_openapi::api::core::v1::PodStatus;
use keblet::model::ContainerId;
use keblet::model::PodUid;
use keblet::model::ProbeKind;
use keblet::model::ProbeResult;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use tempfile::TempDir;
use tokio::time::Instant;
use tokio::time::sleep;

const SOON: Duration = Duration::from_secs(60);

/// A pod whose container runs for some time, and its container's id.
async fn running() -> (SimRuntime, TempDir, Agent, PodUid, ContainerId) {
    let (sim, folder) = node();
    let web = pod("web").running("main", "run").build();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web]);
    let runs = |l: &Trace| l.live("web", "main").is_some();
    sim.until("it runs", SOON, runs).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sleep(Duration::from_secs(10)).await;
    let id = sim.trace(|l| l.live("web", "main").expect("it runs").id.clone());
    (sim, folder, agent, PodUid::from("web-uid"), ContainerId::from(id))
}

fn readiness(status: &PodStatus) -> (Option<bool>, bool, String) {
    let container = status.container_statuses.iter().flatten().next().expect("a container");
    let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready").expect("a condition");
    (container.started, container.ready, ready.status.clone())
}

#[tokio::test(start_paused = true)]
async fn a_failed_liveness_probe_restarts_the_container_at_once() {
    let (sim, _folder, agent, uid, id) = running().await;
    let since = Instant::now();
    agent.probes.set(&uid, &id, ProbeKind::Liveness, ProbeResult::Failure);
    let restarted = |l: &Trace| l.live("web", "main").is_some_and(|instance| instance.id != id.as_str());
    sim.until("it is restarted", SOON, restarted).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    assert!(since.elapsed() < Duration::from_secs(7), "no more than its grace period: {:?}", since.elapsed());
    sleep(Duration::from_secs(600)).await;
    let starts = sim.trace(|l| l.history("web", "main").count());
    assert_eq!(starts, 2, "the result is about the first instance alone");
}

#[tokio::test(start_paused = true)]
async fn readiness_and_startup_results_change_the_status_at_once() {
    let (sim, _folder, agent, uid, id) = running().await;
    let table = [
        (ProbeKind::Readiness, ProbeResult::Failure, (Some(true), false, "False")),
        (ProbeKind::Readiness, ProbeResult::Success, (Some(true), true, "True")),
        (ProbeKind::Startup, ProbeResult::Unknown, (Some(false), false, "False")),
        (ProbeKind::Startup, ProbeResult::Success, (Some(true), true, "True")),
    ];
    let ready = |agent: &Agent| readiness(&agent.statuses.get(&uid).expect("a status"));
    assert_eq!(ready(&agent), (Some(true), true, "True".to_owned()), "without a result it is ready");
    for (kind, result, (started, is_ready, condition)) in table {
        agent.probes.set(&uid, &id, kind, result);
        sleep(Duration::from_millis(50)).await;
        assert_eq!(ready(&agent), (started, is_ready, condition.to_owned()), "{kind:?} {result:?}");
    }
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "it is not restarted");
}

#[tokio::test(start_paused = true)]
async fn a_readiness_result_does_not_wait_for_a_worker_that_is_busy() {
    let (sim, _folder, agent, uid, id) = running().await;
    sim.faults(|faults| faults.add(CallFault::on(Method::StopContainer, FaultKind::Hang)));
    agent.probes.set(&uid, &id, ProbeKind::Liveness, ProbeResult::Failure);
    sleep(Duration::from_secs(1)).await;
    agent.probes.set(&uid, &id, ProbeKind::Readiness, ProbeResult::Failure);
    sleep(Duration::from_millis(50)).await;
    let (_, ready, condition) = readiness(&agent.statuses.get(&uid).expect("a status"));
    assert_eq!((ready, condition.as_str()), (false, "False"));
}
