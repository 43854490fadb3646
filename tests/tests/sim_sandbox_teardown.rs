//! When the sandboxes of pods that have ended by themselves are stopped: nobody waits for that, until somebody does.

use std::time::Duration;

use keblet::model::Pod;
use keblet_tests::cri::*;
use keblet_tests::node::{Agent, Api, PodOf, Senses, node, pod};
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;

/// Nothing here takes longer, on the simulated node's clock.
const SOON: Duration = Duration::from_secs(60);

const fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// A pod that nobody starts anew.
fn once(name: &str) -> PodOf {
    pod(name).restarted("Never").running("main", "run")
}

/// Waits until this many run, and nothing is told of them any more.
async fn running(sim: &SimRuntime, count: usize) {
    let running = |l: &Trace| l.live_count() == count;
    sim.until("all run", SOON, running).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sleep(Duration::from_secs(10)).await;
}

/// The first of these pods ends now, each of the others 100 ms after the one before it.
fn procession(sim: &SimRuntime, pods: Vec<String>) -> AbortOnDropHandle<()> {
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

fn ended(sim: &SimRuntime, pod: &str) -> Instant {
    sim.trace(|l| l.history(pod, "main").find_map(|i| i.exited.as_ref().map(|(at, _)| *at))).expect("it has ended")
}

/// How long after its end the pod's sandbox was first asked to stop.
async fn buried_after(sim: &SimRuntime, pod: &str) -> Duration {
    let sandbox = format!("{pod}_default_{pod}-uid_0");
    let is_it = |call: &&Call| call.method == Method::StopPodSandbox && call.object == sandbox;
    let at = |l: &Trace| l.calls().find(is_it).map(|call| call.at);
    sim.until(&format!("{pod} is buried"), SOON, |l| at(l).is_some())
        .await
        .unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sim.trace(at).expect("it is buried").duration_since(ended(sim, pod))
}

#[tokio::test(start_paused = true)]
async fn statuses_are_sent_before_sandbox_teardown() {
    let ((sim, folder), api) = (node(), Api::default());
    let pods = names(10).iter().map(|name| api.put(&once(name).from_api().build())).collect();
    let _agent = Agent::start_in_cluster(&sim, Senses::ALL, folder.path(), pods, &api);
    running(&sim, 10).await;
    let _ends = procession(&sim, names(10));
    let first = |l: &Trace| l.count(Method::StopPodSandbox) > 0;
    sim.until("a burial", SOON, first).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    for name in names(10) {
        let status = api.pod(&name).and_then(|pod| pod.status.clone()).expect("a status");
        assert_eq!(status.phase.as_deref(), Some("Succeeded"), "{name}: {}", sim.trace(Trace::to_string));
    }
    let last = ended(&sim, "p9");
    let since = last.elapsed();
    assert!(since >= ms(250) && since < ms(500), "{since:?}");
    for name in names(10) {
        buried_after(&sim, &name).await;
    }
    assert!(last.elapsed() < Duration::from_secs(3), "one after the other, without a pause: {:?}", last.elapsed());
}

#[tokio::test(start_paused = true)]
async fn sandbox_teardown_starts_after_the_maximum_delay() {
    let (sim, folder) = node();
    let mut pods: Vec<Pod> = names(80).iter().map(|name| once(name).build()).collect();
    pods.extend([once("net").own_network().build(), once("pid").host_pid().build()]);
    let _agent = Agent::start(&sim, Senses::ALL, folder.path(), pods);
    running(&sim, 82).await;
    let all = ["net", "pid"].map(str::to_owned).into_iter().chain(names(80)).collect();
    let _ends = procession(&sim, all);
    for (pod, least) in [("net", 0), ("pid", 0), ("p0", 5000), ("p20", 5000)] {
        let after = buried_after(&sim, pod).await;
        assert!(after >= ms(least) && after < ms(least + 500), "{pod}: {after:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn deleted_pod_is_finished_before_the_node_is_idle() {
    let ((sim, folder), api) = (node(), Api::default());
    let mut pods: Vec<Pod> = names(30).iter().map(|name| once(name).build()).collect();
    let web = once("web").from_api();
    pods.push(api.put(&web.clone().build()));
    let agent = Agent::start_in_cluster(&sim, Senses::ALL, folder.path(), pods, &api);
    running(&sim, 31).await;
    let _ends = procession(&sim, ["web".to_owned()].into_iter().chain(names(30)).collect());
    sleep(ms(400)).await;
    assert_eq!(sim.trace(|l| l.count(Method::StopPodSandbox)), 0, "the node is not quiet");
    agent.update(api.put(&web.deleting().build())).await;
    sleep(ms(100)).await;
    assert_eq!(api.deleted().len(), 1, "the object does not wait");
    let after = buried_after(&sim, "web").await;
    assert!(after > ms(3000) && after < ms(5500), "the remains do: {after:?}");
}

#[tokio::test(start_paused = true)]
async fn sandbox_teardown_continues_with_the_next_agent() {
    let ((sim, folder), api) = (node(), Api::default());
    let first = api.put(&once("web").from_api().build());
    let agent = Agent::start_in_cluster(&sim, Senses::ALL, folder.path(), vec![first], &api);
    running(&sim, 1).await;
    sim.kill("web", "main", Exit::Code(3)).expect("it runs");
    sleep(ms(200)).await;
    drop(agent);
    let status = || api.pod("web").and_then(|pod| pod.status.clone()).expect("nobody deletes it");
    let (known, told) = (api.pod("web").expect("nobody deletes it"), status());
    assert_eq!(told.phase.as_deref(), Some("Failed"), "told before it is buried");
    assert_eq!(sim.trace(|l| l.count(Method::StopPodSandbox)), 0);
    let _agent = Agent::start_in_cluster(&sim, Senses::ALL, folder.path(), vec![known], &api);
    buried_after(&sim, "web").await;
    sleep(Duration::from_secs(60)).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1, "it is not started again");
    assert_eq!((status().phase, status().container_statuses), (told.phase, told.container_statuses));
}
