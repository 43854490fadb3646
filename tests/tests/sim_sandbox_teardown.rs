//! When the sandboxes of pods that terminated on their own are stopped.

use std::time::Duration;

use keblet::model::Pod;
use keblet_tests::cri::*;
use keblet_tests::node::{Agent, Api, PodOf, SensorSet, node, pod};
use tokio::time::{Instant, sleep};
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

#[tokio::test(start_paused = true)]
async fn exits_in_quick_succession_are_reported_before_any_teardown() {
    let ((sim, folder), api) = (node(), Api::default());
    let pods = names(5).iter().map(|name| api.put(&once(name).from_api().build())).collect();
    let _agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), pods, &api);
    running(&sim, 5).await;
    let _exits = exit_in_succession(&sim, names(5));
    let first = |l: &Trace| l.count(Method::StopPodSandbox) > 0;
    sim.until("a teardown", SOON, first).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    for name in names(5) {
        let status = api.pod(&name).and_then(|pod| pod.status.clone()).expect("a status");
        assert_eq!(status.phase.as_deref(), Some("Succeeded"), "{name}: {}", sim.trace(Trace::to_string));
    }
    let last = exited(&sim, "p4");
    let since = last.elapsed();
    assert!(since >= ms(250) && since < ms(500), "{since:?}");
    for name in names(5) {
        torn_down_after(&sim, &name).await;
    }
    assert!(last.elapsed() < Duration::from_secs(3), "one after the other, without a pause: {:?}", last.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_teardown_waits_no_longer_than_750_ms_on_a_busy_node() {
    let (sim, folder) = node();
    let mut pods: Vec<Pod> = names(80).iter().map(|name| once(name).build()).collect();
    pods.extend([once("net").own_network().build(), once("pid").host_pid().build()]);
    let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    running(&sim, 82).await;
    let all = ["net", "pid"].map(str::to_owned).into_iter().chain(names(80)).collect();
    let _exits = exit_in_succession(&sim, all);
    for (pod, least) in [("net", 0), ("pid", 0), ("p0", 750), ("p20", 750)] {
        let after = torn_down_after(&sim, pod).await;
        assert!(after >= ms(least) && after < ms(least + 500), "{pod}: {after:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_object_of_a_deleted_pod_does_not_wait_for_an_idle_node() {
    let ((sim, folder), api) = (node(), Api::default());
    let mut pods: Vec<Pod> = names(30).iter().map(|name| once(name).build()).collect();
    let web = once("web").from_api();
    pods.push(api.put(&web.clone().build()));
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), pods, &api);
    running(&sim, 31).await;
    let _exits = exit_in_succession(&sim, ["web".to_owned()].into_iter().chain(names(30)).collect());
    sleep(ms(400)).await;
    assert_eq!(sim.trace(|l| l.count(Method::StopPodSandbox)), 0, "the node is not idle");
    agent.update(api.put(&web.deleting().build())).await;
    sleep(ms(100)).await;
    assert_eq!(api.deleted().len(), 1, "the object is deleted at once");
    let after = torn_down_after(&sim, "web").await;
    assert!(after > ms(600) && after < ms(1500), "the sandbox teardown waits: {after:?}");
}

#[tokio::test(start_paused = true)]
async fn the_next_agent_tears_down_what_a_killed_one_has_not() {
    let ((sim, folder), api) = (node(), Api::default());
    let first = api.put(&once("web").from_api().build());
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![first], &api);
    running(&sim, 1).await;
    sim.kill("web", "main", Exit::Code(3)).expect("it runs");
    sleep(ms(200)).await;
    drop(agent);
    let status = || api.pod("web").and_then(|pod| pod.status.clone()).expect("it is not deleted");
    let (pod, reported) = (api.pod("web").expect("it is not deleted"), status());
    assert_eq!(reported.phase.as_deref(), Some("Failed"), "reported before the teardown");
    assert_eq!(sim.trace(|l| l.count(Method::StopPodSandbox)), 0);
    let _agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![pod], &api);
    torn_down_after(&sim, "web").await;
    sleep(Duration::from_secs(60)).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "it is not started again");
    assert_eq!((status().phase, status().container_statuses), (reported.phase, reported.container_statuses));
}
