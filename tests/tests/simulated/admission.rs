//! Admission on the whole agent: a pod is decided on once, and one that is rejected although it runs keeps running.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::PodOS;
use k8s_openapi::api::core::v1::PodResourceClaim;
use k8s_openapi::api::core::v1::PodStatus;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::PodOf;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::until;
use tokio::time::Instant;
use tokio::time::sleep;

const UID: &str = "web-uid";
const LONG: Duration = Duration::from_secs(600);

fn status(agent: &Agent) -> PodStatus {
    agent.statuses.get(&PodUid::from(UID)).expect("a status")
}

/// The pod with a field that this agent does not support.
fn unsupported(pod: PodOf) -> Pod {
    let mut pod = Arc::unwrap_or_clone(pod.build());
    let claim = PodResourceClaim { name: "gpu".to_owned(), ..PodResourceClaim::default() };
    pod.spec.as_mut().expect("a spec").resource_claims = Some(vec![claim]);
    Arc::new(pod)
}

/// A node where another kubelet has started the pod, now run by an agent that does not support all of it.
async fn swapped(sim: &SimRuntime, folder: &Path, web: &PodOf) -> Agent {
    let former = Agent::start(sim, SensorSet::ALL, folder, vec![web.clone().build()]);
    until(sim, "it runs", |l| l.live("web", "main").is_some()).await;
    // The runtime reports it as running a little later than it runs.
    sleep(Duration::from_secs(1)).await;
    drop(former);
    Agent::start(sim, SensorSet::ALL, folder, vec![unsupported(web.clone())])
}

fn stops(sim: &SimRuntime) -> usize {
    sim.trace(|l| l.calls().filter(|call| call.method == Method::StopContainer).count())
}

#[tokio::test(start_paused = true)]
async fn a_rejected_pod_that_runs_is_not_killed() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "run");
    let agent = swapped(&sim, folder.path(), &web).await;
    // Updates and housekeeping look at it again.
    let other = pod("other").running("main", "run").build();
    agent.add(other.clone()).await;
    until(&sim, "another pod runs", |l| l.live("other", "main").is_some()).await;
    agent.remove(other).await;
    until(&sim, "the other pod is gone", |l| l.live("other", "main").is_none()).await;
    sleep(LONG).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "{}", sim.trace(Trace::to_string));
    assert!(sim.trace(|l| l.live("web", "main").is_some()), "{}", sim.trace(Trace::to_string));
    let status = status(&agent);
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Running"), Some("PodFeatureUnsupported")));
    let message = status.message.expect("a message");
    assert!(message.contains("resourceClaims") && message.contains("run on unmanaged"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn an_unmanaged_pod_ends_with_its_own_grace_period_when_it_is_removed() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "term ignore");
    let agent = swapped(&sim, folder.path(), &web).await;
    sleep(LONG).await;
    assert_eq!(stops(&sim), 0);
    let began = Instant::now();
    agent.remove(unsupported(web)).await;
    until(&sim, "it is gone", |l| l.live("web", "main").is_none()).await;
    let took = began.elapsed();
    assert!((Duration::from_secs(5)..Duration::from_secs(8)).contains(&took), "its grace period is 5 s: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_unmanaged_pod_of_the_api_ends_when_it_is_deleted() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "term ignore").from_api();
    let agent = swapped(&sim, folder.path(), &web).await;
    sleep(LONG).await;
    assert_eq!(stops(&sim), 0);
    let began = Instant::now();
    agent.update(unsupported(web.deleting())).await;
    until(&sim, "it is gone", |l| l.live("web", "main").is_none()).await;
    let took = began.elapsed();
    assert!((Duration::from_secs(5)..Duration::from_secs(8)).contains(&took), "its grace period is 5 s: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_unmanaged_pod_whose_containers_have_exited_fails() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "exit 0 60s");
    let agent = swapped(&sim, folder.path(), &web).await;
    sleep(Duration::from_secs(20)).await;
    let phase = status(&agent).phase;
    assert_eq!(phase.as_deref(), Some("Running"), "{}", sim.trace(Trace::to_string));
    sleep(LONG).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "nothing is restarted");
    let status = status(&agent);
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("PodFeatureUnsupported")));
}

#[tokio::test(start_paused = true)]
async fn a_pod_for_another_operating_system_is_never_started() {
    let (sim, folder) = node();
    let mut foreign = Arc::unwrap_or_clone(pod("web").running("main", "run").build());
    foreign.spec.as_mut().expect("a spec").os = Some(PodOS { name: "windows".to_owned() });
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![Arc::new(foreign.clone())]);
    sleep(LONG).await;
    // A decision holds for the UID, whatever the object says later.
    foreign.spec.as_mut().expect("a spec").os = None;
    agent.update(Arc::new(foreign)).await;
    sleep(LONG).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 0, "{}", sim.trace(Trace::to_string));
    let status = status(&agent);
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("PodOSNotSupported")));
}
