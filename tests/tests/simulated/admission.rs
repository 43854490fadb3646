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
use keblet_tests::node::Api;
use keblet_tests::node::PodOf;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::recorder;
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

/// Another kubelet has started the pod, and is gone.
async fn started(sim: &SimRuntime, folder: &Path, web: &PodOf) {
    let _former = Agent::start(sim, SensorSet::ALL, folder, vec![web.clone().build()]);
    until(sim, "it runs", |l| l.live("web", "main").is_some()).await;
    // The runtime reports it as running a little later than it runs.
    sleep(Duration::from_secs(1)).await;
}

/// A node where another kubelet has started the pod, now run by an agent that does not support all of it.
async fn swapped(sim: &SimRuntime, folder: &Path, web: &PodOf) -> Agent {
    started(sim, folder, web).await;
    Agent::start(sim, SensorSet::ALL, folder, vec![unsupported(web.clone())])
}

/// As [`started`], for a pod of this API server. Returns it with a field that this agent does not support.
async fn started_in_cluster(sim: &SimRuntime, folder: &Path, web: &PodOf, api: &Api) -> Pod {
    let created = api.put(&web.clone().build());
    let _former = Agent::start_in_cluster(sim, SensorSet::ALL, folder, vec![created], api);
    until(sim, "it runs", |l| l.live_count() == 1).await;
    sleep(Duration::from_secs(5)).await;
    api.put(&unsupported(web.clone()))
}

/// As [`swapped`], for a pod of this API server.
async fn swapped_in_cluster(sim: &SimRuntime, folder: &Path, web: &PodOf, api: &Api) -> Agent {
    let web = started_in_cluster(sim, folder, web, api).await;
    Agent::start_in_cluster(sim, SensorSet::ALL, folder, vec![web], api)
}

/// The pod's status at the API server.
fn sent(api: &Api) -> PodStatus {
    api.pod("web").and_then(|pod| pod.status.clone()).expect("a status")
}

/// The pod has failed for its field, with this exit code, and its sandbox is stopped.
fn assert_failed(sim: &SimRuntime, status: &PodStatus, exit_code: i32) {
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("PodFeatureUnsupported")));
    let message = status.message.as_deref().unwrap_or_default();
    assert!(message.starts_with("Pod was rejected: ") && !message.contains("run on unmanaged"), "{message}");
    assert_eq!(exit_codes(status), [Some(exit_code)]);
    assert!(status.conditions.iter().flatten().any(|condition| condition.type_ == "Ready"), "{status:?}");
    assert!(sim.trace(|l| l.count(Method::StopPodSandbox)) > 0, "{}", sim.trace(Trace::to_string));
}

fn exit_codes(status: &PodStatus) -> Vec<Option<i32>> {
    let states = status.container_statuses.iter().flatten().map(|container| container.state.as_ref());
    states.map(|state| Some(state?.terminated.as_ref()?.exit_code)).collect()
}

fn stops(sim: &SimRuntime) -> usize {
    sim.trace(|l| l.calls().filter(|call| call.method == Method::StopContainer).count())
}

#[tokio::test(start_paused = true)]
async fn a_rejected_pod_that_runs_is_not_killed() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "run");
    started(&sim, folder.path(), &web).await;
    let (recorder, events) = recorder();
    let pods = vec![unsupported(web)];
    let agent = Agent::start_with_recorder(&sim, SensorSet::ALL, folder.path(), pods, recorder);
    // Updates and housekeeping check it again.
    let other = pod("other").running("main", "run").build();
    agent.add(other.clone()).await;
    until(&sim, "another pod runs", |l| l.live("other", "main").is_some()).await;
    agent.remove(other).await;
    until(&sim, "the other pod is gone", |l| l.live("other", "main").is_none()).await;
    sleep(LONG).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "{}", sim.trace(Trace::to_string));
    assert!(sim.trace(|l| l.live("web", "main").is_some()), "{}", sim.trace(Trace::to_string));
    let events = events.lock().expect("not poisoned").clone();
    let rejected: Vec<_> = events.iter().filter(|(_, event)| event["reason"] == "PodFeatureUnsupported").collect();
    let message = rejected[0].1["message"].as_str().unwrap_or_default();
    assert_eq!(rejected.len(), 1, "{rejected:?}");
    assert!(message.contains("resourceClaims") && message.contains("run on unmanaged"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn the_status_of_an_unmanaged_pod_stays_as_it_is() {
    let rows = [pod("web").running("main", "run"), pod("web").after("init", "run").running("main", "run")];
    for (web, phase) in rows.map(PodOf::from_api).into_iter().zip(["Running", "Pending"]) {
        let ((sim, folder), api) = (node(), Api::default());
        let stored = started_in_cluster(&sim, folder.path(), &web, &api).await;
        let before = sent(&api);
        assert_eq!(before.phase.as_deref(), Some(phase));
        let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![stored], &api);
        sleep(LONG).await;
        assert_eq!(sent(&api), before);
        assert_eq!(sim.trace(Trace::live_count), 1, "it runs on");
        drop(agent);
        // An agent that supports all of it manages the pod again.
        let managed = api.put(&web.build());
        let _agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![managed], &api);
        sleep(LONG).await;
        let after = sent(&api);
        assert_eq!((after.phase.as_deref(), after.reason, after.message), (Some(phase), None, None));
    }
}

#[tokio::test(start_paused = true)]
async fn an_unmanaged_pod_runs_on_while_the_runtime_does_not_tell_of_it() {
    let ((sim, folder), api) = (node(), Api::default());
    let web = pod("web").running("main", "run").from_api();
    let stored = started_in_cluster(&sim, folder.path(), &web, &api).await;
    let fails = FaultKind::Fail(tonic::Code::Unknown, "simulated".to_owned());
    sim.faults(|faults| faults.add(CallFault::on_all(fails).about("web_")));
    let _agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![stored], &api);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(sent(&api).phase.as_deref(), Some("Running"));
    sim.faults(Faults::clear);
    sleep(LONG).await;
    assert_eq!(sent(&api).phase.as_deref(), Some("Running"));
    assert!(sim.trace(|l| l.live("web", "main").is_some()), "{}", sim.trace(Trace::to_string));
    sim.kill("web", "main", Exit::Code(3));
    sleep(LONG).await;
    assert_failed(&sim, &sent(&api), 3);
}

/// As after a runtime that did not answer, and lists nothing when it does: the pod is no longer taken to run.
#[tokio::test(start_paused = true)]
async fn a_refused_pod_that_the_runtime_does_not_have_fails_once_that_is_known() {
    let ((sim, folder), api) = (node(), Api::default());
    let web = api.put(&unsupported(pod("web").running("main", "run").from_api()));
    let fails = FaultKind::Fail(tonic::Code::Unknown, "simulated".to_owned());
    sim.faults(|faults| faults.add(CallFault::on(Method::ListPodSandbox, fails)));
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(agent.statuses.get(&PodUid::from(UID)).and_then(|status| status.phase), None, "it may run");
    sim.faults(Faults::clear);
    sleep(LONG).await;
    let status = sent(&api);
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("PodFeatureUnsupported")));
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

/// The field that is not supported was removed from the manifest.
#[tokio::test(start_paused = true)]
async fn the_successor_of_an_unmanaged_static_pod_starts_when_that_has_ended() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "term ignore");
    let agent = swapped(&sim, folder.path(), &web).await;
    sleep(LONG).await;
    agent.remove(unsupported(web.clone())).await;
    agent.add(web.uid("web-uid-2").build()).await;
    let new_runs = |l: &Trace| l.live("web", "main").is_some_and(|instance| instance.pod_uid == "web-uid-2");
    until(&sim, "its successor runs", new_runs).await;
    let (gone, started) = sim.trace(|l| {
        let former = l.history("web", "main").find(|instance| instance.pod_uid == UID).and_then(|former| former.gone);
        (former.expect("it has ended"), l.live("web", "main").and_then(|instance| instance.started).expect("it runs"))
    });
    assert!(started >= gone && started - gone < Duration::from_secs(5), "{}", sim.trace(Trace::to_string));
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
    let ((sim, folder), api) = (node(), Api::default());
    let web = pod("web").running("main", "exit 0 60s").from_api();
    let _agent = swapped_in_cluster(&sim, folder.path(), &web, &api).await;
    sleep(Duration::from_secs(20)).await;
    assert_eq!(sent(&api).phase.as_deref(), Some("Running"), "{}", sim.trace(Trace::to_string));
    sleep(LONG).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "nothing is restarted");
    assert_failed(&sim, &sent(&api), 0);
}

#[tokio::test(start_paused = true)]
async fn an_unmanaged_static_pod_whose_containers_have_exited_fails() {
    let (sim, folder) = node();
    let agent = swapped(&sim, folder.path(), &pod("web").running("main", "exit 0 60s")).await;
    sleep(LONG).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "nothing is restarted");
    assert_failed(&sim, &status(&agent), 0);
}

#[tokio::test(start_paused = true)]
async fn a_pod_whose_container_awaits_its_restart_is_not_unmanaged_but_fails() {
    let ((sim, folder), api) = (node(), Api::default());
    let web = pod("web").running("main", "exit 1 1s").from_api().own_network();
    let _agent = swapped_in_cluster(&sim, folder.path(), &web, &api).await;
    let (live, starts) = sim.trace(|l| (l.live_count(), l.history("web", "main").count()));
    assert_eq!(live, 0, "it is in back-off");
    sleep(LONG).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), starts, "nothing is restarted");
    assert_failed(&sim, &sent(&api), 1);
}

#[tokio::test(start_paused = true)]
async fn an_unmanaged_pod_that_completes_has_succeeded() {
    let ((sim, folder), api) = (node(), Api::default());
    let web = pod("web").running("main", "exit 0 60s").restarted("Never").from_api();
    let _agent = swapped_in_cluster(&sim, folder.path(), &web, &api).await;
    sleep(LONG).await;
    let status = sent(&api);
    assert_eq!((status.phase.as_deref(), exit_codes(&status)), (Some("Succeeded"), vec![Some(0)]));
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
