//! When the sandboxes of pods that terminated on their own are stopped.

use std::time::Duration;

use keblet::model::Pod;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::PodOf;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio_util::task::AbortOnDropHandle;

/// Deadline of every wait, on the simulated node's clock.
const SOON: Duration = Duration::from_secs(60);

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// A pod that is not restarted.
fn once(name: &str) -> PodOf {
    pod(name).restarted("Never").running("main", "run")
}

/// Waits until this many run and their statuses are published.
async fn running(sim: &SimRuntime, count: usize) {
    let running = |l: &Trace| l.live_count() == count;
    sim.until("all run", SOON, running).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sleep(Duration::from_secs(10)).await;
}

/// The first of these pods exits now, each of the others 100 ms after the one before it.
fn exit_in_succession(sim: &SimRuntime, pods: Vec<String>) -> AbortOnDropHandle<()> {
    let sim = sim.clone();
    AbortOnDropHandle::new(tokio::spawn(async move {
        for pod in pods {
            sim.kill(&pod, "main", Exit::Code(0)).expect("it runs");
            sleep(ms(100)).await;
        }
    }))
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("p{n}")).collect()
}

fn exited(sim: &SimRuntime, pod: &str) -> Instant {
    sim.trace(|l| l.history(pod, "main").find_map(|i| i.exited.as_ref().map(|(at, _)| *at))).expect("it has exited")
}

/// Time from the pod's exit to the first request to stop its sandbox.
async fn torn_down_after(sim: &SimRuntime, pod: &str) -> Duration {
    let sandbox = format!("{pod}_default_{pod}-uid_0");
    let is_it = |call: &&Call| call.method == Method::StopPodSandbox && call.object == sandbox;
    let at = |l: &Trace| l.calls().find(is_it).map(|call| call.at);
    sim.until(&format!("the sandbox of {pod} is stopped"), SOON, |l| at(l).is_some())
        .await
        .unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sim.trace(at).expect("it is stopped").duration_since(exited(sim, pod))
}

/// Pods that exit in quick succession do not delay the teardown of any sandbox.
#[tokio::test(start_paused = true)]
async fn a_sandbox_is_torn_down_as_soon_as_its_pod_has_terminated() {
    let (sim, folder) = node();
    let mut pods: Vec<Pod> = names(30).iter().map(|name| once(name).build()).collect();
    pods.extend([once("net").own_network().build(), once("pid").host_pid().build()]);
    let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    running(&sim, 32).await;
    let all = ["net", "pid"].map(str::to_owned).into_iter().chain(names(30)).collect();
    let _exits = exit_in_succession(&sim, all);
    for pod in ["net", "pid", "p0", "p20"] {
        let after = torn_down_after(&sim, pod).await;
        assert!(after < ms(400), "{pod}: {after:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_next_agent_tears_down_what_a_killed_one_has_not() {
    let ((sim, folder), api) = (node(), Api::default());
    let first = api.put(&once("web").from_api().build());
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![first], &api);
    running(&sim, 1).await;
    sim.faults(|f| f.add(CallFault::on(Method::StopPodSandbox, FaultKind::Hang)));
    sim.kill("web", "main", Exit::Code(3)).expect("it runs");
    sleep(ms(200)).await;
    drop(agent);
    sim.faults(Faults::clear);
    let status = || api.pod("web").and_then(|pod| pod.status.clone()).expect("it is not deleted");
    let (pod, reported) = (api.pod("web").expect("it is not deleted"), status());
    assert_eq!(reported.phase.as_deref(), Some("Failed"), "reported before the teardown");
    let hung = sim.trace(|l| l.count(Method::StopPodSandbox));
    let _agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![pod], &api);
    let again = |l: &Trace| l.count(Method::StopPodSandbox) > hung;
    sim.until("the teardown", SOON, again).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sleep(Duration::from_secs(60)).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "it is not started again");
    assert_eq!((status().phase, status().container_statuses), (reported.phase, reported.container_statuses));
}

/// A process that the runtime does not report ends with its sandbox: until then its pod exists, with its volumes.
#[tokio::test(start_paused = true)]
async fn a_deleted_pod_exists_until_a_container_whose_state_is_not_known_has_ended() {
    let ((sim, folder), api) = (node(), Api::default());
    let web = || pod("web").from_api().running("main", "run");
    let first = api.put(&web().build());
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![first], &api);
    running(&sim, 1).await;
    drop(agent);
    sim.lose_state("web", "main").expect("it runs");
    sim.faults(|f| f.add(CallFault::on(Method::StopPodSandbox, FaultKind::Slow(Duration::from_secs(30)))));
    let deleted = api.put(&web().deleting().build());
    let _agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![deleted], &api);
    sleep(Duration::from_secs(20)).await;
    let (stops, live) = sim.trace(|l| (l.count(Method::StopPodSandbox), l.live_count()));
    assert_eq!((stops, live), (1, 1), "it runs until its sandbox is stopped: {}", sim.trace(Trace::to_string));
    assert!(api.pod("web").is_some(), "{}", sim.trace(Trace::to_string));
    let has_ended = |l: &Trace| l.live_count() == 0;
    sim.until("it has ended", SOON, has_ended).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    // The removal of the sandbox begins with another stop.
    sleep(Duration::from_secs(60)).await;
    assert!(api.pod("web").is_none(), "{}", sim.trace(Trace::to_string));
}
