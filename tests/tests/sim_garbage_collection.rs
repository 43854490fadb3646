//! Garbage collection of containers and sandboxes by pod workers, without periodic lists; and deletion at the API
//! server by the next agent.

use std::path::Path;
use std::time::Duration;

use keblet::images::GcPolicy;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use tokio::time::sleep;
use tonic::Code;

/// Deadline of every wait, on the simulated node's clock.
const SOON: Duration = Duration::from_secs(900);

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn start(sim: &SimRuntime, root: &Path, pods: Vec<keblet::model::Pod>) -> Agent {
    Agent::start(sim, SensorSet::ALL, root, pods)
}

async fn until_attempt(sim: &SimRuntime, attempt: u32) {
    let running = |l: &Trace| l.live("web", "main").is_some_and(|i| i.attempt == attempt);
    sim.until(&format!("attempt {attempt} runs"), SOON, running)
        .await
        .unwrap_or_else(|timed_out| panic!("{timed_out}"));
}

/// Attempts that still exist in the runtime.
fn remaining(sim: &SimRuntime) -> Vec<u32> {
    sim.trace(|l| l.history("web", "main").filter(|i| i.removed.is_none()).map(|i| i.attempt).collect())
}

#[tokio::test(start_paused = true)]
async fn replaced_sandbox_is_removed_with_its_last_exited_container() {
    let (sim, folder) = node();
    let _agent = start(&sim, folder.path(), vec![pod("web").running("main", "run").build()]);
    until_attempt(&sim, 0).await;
    sleep(secs(5)).await;
    assert_eq!(sim.kill_sandboxes("web"), 1);
    until_attempt(&sim, 1).await;
    sleep(secs(60)).await;
    assert_eq!(
        (remaining(&sim), sim.sandboxes("web").len()),
        (vec![0, 1], 2),
        "one exited instance is kept in its sandbox"
    );
    sim.kill("web", "main", Exit::Code(1)).expect("it runs");
    until_attempt(&sim, 2).await;
    sleep(secs(60)).await;
    assert_eq!((remaining(&sim), sim.sandboxes("web").len()), (vec![1, 2], 1), "{}", sim.trace(Trace::to_string));
    let calls = || sim.trace(|l| l.total() - l.count(Method::Status));
    let before = calls();
    // Until the next relist, which comes every five minutes.
    sleep(secs(100)).await;
    assert_eq!(calls(), before, "no calls while there is nothing to remove");
}

#[tokio::test(start_paused = true)]
async fn finished_pod_keeps_one_exited_container() {
    let (sim, folder) = node();
    sim.script("web", "main", None, Program::exits(1, secs(1)));
    sim.script("web", "main", Some(2), Program::exits(0, secs(1)));
    let _agent = start(&sim, folder.path(), vec![pod("web").restarted("OnFailure").running("main", "run").build()]);
    until_attempt(&sim, 2).await;
    sleep(secs(60)).await;
    assert_eq!(remaining(&sim), [2], "{}", sim.trace(Trace::to_string));
}

#[tokio::test(start_paused = true)]
async fn failed_container_removal_is_retried() {
    let (sim, folder) = node();
    // One failure while the third instance is in back-off, and one while it runs.
    let fails = FaultKind::Fail(Code::Unknown, "not now".to_owned());
    sim.faults(|f| f.add(CallFault::on(Method::RemoveContainer, fails).times(2)));
    let _agent = start(&sim, folder.path(), vec![pod("web").running("main", "exit 1 2s until 2").build()]);
    until_attempt(&sim, 2).await;
    sleep(secs(5)).await;
    assert_eq!(remaining(&sim), [0, 1, 2], "the removal has failed");
    // One minute, then two: pauses grow, with a random share of up to a half.
    sleep(secs(300)).await;
    assert_eq!(remaining(&sim), [1, 2], "{}", sim.trace(Trace::to_string));
}

/// A deleted pod terminates while the API server is unavailable, and the agent is killed before it could report that:
/// after the stop requests, after the exits, or when the sandbox is removed.
#[tokio::test(start_paused = true)]
async fn pod_terminated_while_the_api_server_was_down_is_deleted_by_the_next_agent() {
    for later in [Duration::ZERO, Duration::from_millis(60), secs(30)] {
        let (sim, folder) = node();
        let (api, web) = (Api::default(), pod("web").running("main", "term 50ms").from_api());
        let phase = |pod: &keblet::model::Pod| pod.status.as_ref().and_then(|status| status.phase.clone());
        let first = api.put(&web.clone().build());
        let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![first], &api);
        until_attempt(&sim, 0).await;
        sleep(secs(5)).await;
        assert_eq!(api.pod("web").as_ref().and_then(phase).as_deref(), Some("Running"));
        let deleting = api.put(&web.deleting().build());
        api.set_unavailable(true);
        agent.update(deleting).await;
        let stopping = |l: &Trace| l.count(Method::StopContainer) > 0;
        sim.until("stop requested", SOON, stopping).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
        sleep(later).await;
        drop(agent);
        sleep(secs(1)).await;

        api.set_unavailable(false);
        let reported = api.pod("web").expect("its termination is not reported");
        assert_eq!(phase(&reported).as_deref(), Some("Running"));
        let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![reported.clone()], &api);
        let begin = tokio::time::Instant::now();
        while api.deleted().is_empty() {
            assert!(begin.elapsed() < secs(10), "{later:?}: {:#?}", api.pod("web"));
            sleep(Duration::from_millis(10)).await;
        }
        let last = phase(&api.deleted()[0]);
        assert!(matches!(last.as_deref(), Some("Succeeded" | "Failed")), "{later:?}: {last:?}");
        agent.remove(reported).await;
        sleep(secs(600)).await;
        let attempts: Vec<u32> = sim.trace(|l| l.history("web", "main").map(|i| i.attempt).collect());
        assert_eq!(attempts, [0], "{later:?}: no container is created again");
        assert_eq!(sim.trace(Trace::live_count), 0, "{later:?}");
        assert!(sim.sandboxes("web").is_empty(), "{later:?}");
    }
}

/// Images of containers stay, whatever their age; an unused one expires. Images are listed every five minutes.
#[tokio::test(start_paused = true)]
async fn images_that_nobody_uses_expire() {
    let (sim, folder) = node();
    sim.images(|images| images.store("unused:1", 300 << 20));
    let policy = GcPolicy { max_age: secs(3600), ..GcPolicy::default() };
    let pods = vec![pod("web").running("main", "run").build()];
    let agent = Agent::start_collecting_images(&sim, SensorSet::ALL, folder.path(), pods.clone(), policy);
    until_attempt(&sim, 0).await;
    let removed = || sim.trace(|l| l.count(Method::RemoveImage));
    sleep(secs(3590)).await;
    assert_eq!(removed(), 0, "the agent has not run for longer than the age");
    let lists = sim.trace(|l| l.count(Method::ListImages) + l.count(Method::StreamImages));
    assert!((12..=16).contains(&lists), "{lists} lists in an hour");
    sleep(secs(320)).await;
    assert_eq!(removed(), 1, "{}", sim.trace(Trace::to_string));
    sleep(secs(3600)).await;
    assert_eq!((removed(), remaining(&sim)), (1, vec![0]), "the image of the pod is in use");
    for pod in pods {
        agent.remove(pod).await;
    }
    let begin = tokio::time::Instant::now();
    while !sim.sandboxes("web").is_empty() {
        assert!(begin.elapsed() < SOON, "{}", sim.trace(Trace::to_string));
        sleep(Duration::from_millis(10)).await;
    }
    sleep(secs(3300)).await;
    assert_eq!(removed(), 1, "it was used less than an hour ago");
    sleep(secs(900)).await;
    assert_eq!(removed(), 2, "{}", sim.trace(Trace::to_string));
}
