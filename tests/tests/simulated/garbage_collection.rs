//! Garbage collection of containers and sandboxes by pod workers, without periodic lists; limits on dead containers; and
//! deletion at the API server by the next agent.

use std::path::Path;
use std::time::Duration;

use keblet::images::GcPolicy;
use keblet::model::DeadContainerPolicy;
use keblet_proto::cri::v1;
use keblet_tests::cri::client::Client;
use keblet_tests::cri::client::sandbox;
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
    remaining_of(sim, "web")
}

fn remaining_of(sim: &SimRuntime, pod: &str) -> Vec<u32> {
    sim.trace(|l| l.history(pod, "main").filter(|i| i.removed.is_none()).map(|i| i.attempt).collect())
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

/// As `crictl runp` makes one, of a pod that no source desires.
#[tokio::test(start_paused = true)]
async fn an_undesired_sandbox_without_labels_is_removed() {
    let (sim, folder) = node();
    let config = v1::PodSandboxConfig { labels: Default::default(), ..sandbox("bare", 0) };
    Client::new(sim.memory().channel()).run_sandbox(config).await.expect("sandbox");
    let _agent = start(&sim, folder.path(), vec![pod("web").running("main", "run").build()]);
    until_attempt(&sim, 0).await;
    sleep(secs(60)).await;
    assert!(sim.sandboxes("bare").is_empty(), "{}", sim.trace(Trace::to_string));
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

#[tokio::test(start_paused = true)]
async fn dead_instances_are_kept_by_container_as_configured() {
    for (per_container, expected) in
        [(Some(3), &[2, 3, 4, 5][..]), (Some(1), &[4, 5]), (Some(0), &[5]), (None, &[4, 5])]
    {
        let (sim, folder) = node();
        let policy = DeadContainerPolicy { per_container, ..DeadContainerPolicy::default() };
        let pods = vec![pod("web").running("main", "exit 1 1s until 5").build()];
        let api = Api::default();
        let _agent = Agent::start_limiting_dead_containers(&sim, folder.path(), pods, policy, &api);
        until_attempt(&sim, 5).await;
        sleep(secs(5)).await;
        assert_eq!(remaining(&sim), expected, "{per_container:?}: {}", sim.trace(Trace::to_string));
    }
}

/// The worker wakes up once for it. A restart still follows the instance that it replaces.
#[tokio::test(start_paused = true)]
async fn young_dead_instances_are_removed_when_they_are_old_enough() {
    let (sim, folder) = node();
    let policy = DeadContainerPolicy { per_container: Some(0), min_age: secs(200), ..DeadContainerPolicy::default() };
    let pods = vec![pod("web").running("main", "exit 1 10s until 1").build()];
    let begin = tokio::time::Instant::now();
    let api = Api::default();
    let _agent = Agent::start_limiting_dead_containers(&sim, folder.path(), pods, policy, &api);
    until_attempt(&sim, 1).await;
    sleep(secs(5)).await;
    let calls = || sim.trace(|l| l.total() - l.count(Method::Status));
    let before = calls();
    tokio::time::sleep_until(begin + secs(199)).await;
    assert_eq!((remaining(&sim), calls()), (vec![0, 1], before), "no calls before it is old enough");
    tokio::time::sleep_until(begin + secs(203)).await;
    assert_eq!(remaining(&sim), [1], "{}", sim.trace(Trace::to_string));

    tokio::time::sleep_until(begin + secs(900)).await;
    sim.script("web", "main", Some(2), Program::exits(1, secs(1)));
    sim.kill("web", "main", Exit::Code(1)).expect("it runs");
    until_attempt(&sim, 2).await;
    sleep(secs(5)).await;
    assert_eq!(remaining(&sim), [2], "attempt 1 is old when it dies, attempt 2 waits for its restart");
    until_attempt(&sim, 3).await;
}

#[tokio::test(start_paused = true)]
async fn dead_containers_of_all_pods_are_limited() {
    for (total, expected) in [
        (None, [&[0, 1, 2, 3][..]; 3]),
        (Some(9), [&[0, 1, 2, 3]; 3]),
        (Some(8), [&[1, 2, 3]; 3]),
        (Some(4), [&[2, 3]; 3]),
        (Some(2), [&[3], &[2, 3], &[2, 3]]),
        (Some(0), [&[3]; 3]),
    ] {
        let (sim, folder) = node();
        let policy = DeadContainerPolicy { per_container: Some(5), total, ..DeadContainerPolicy::default() };
        let names = ["a", "b", "c"];
        // The instances of the first pod are the oldest.
        let programs = ["exit 1 1s until 3", "exit 1 2s until 3", "exit 1 3s until 3"];
        let pods =
            names.iter().zip(programs).map(|(name, program)| pod(name).running("main", program).build()).collect();
        let api = Api::default();
        let _agent = Agent::start_limiting_dead_containers(&sim, folder.path(), pods, policy, &api);
        let running = |l: &Trace| names.iter().all(|name| l.live(name, "main").is_some_and(|i| i.attempt == 3));
        sim.until("all run", SOON, running).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
        sleep(secs(65)).await;
        let left = names.map(|name| remaining_of(&sim, name));
        assert_eq!(left, expected.map(<[u32]>::to_vec), "{total:?}: {}", sim.trace(Trace::to_string));
    }
}

/// Only once the API server has the final status of the pod; before that the next agent determines it from
/// the containers.
#[tokio::test(start_paused = true)]
async fn containers_of_an_ended_pod_are_removed_and_it_is_not_started_again() {
    for policy in [
        DeadContainerPolicy { per_container: Some(0), ..DeadContainerPolicy::default() },
        DeadContainerPolicy { total: Some(0), ..DeadContainerPolicy::default() },
    ] {
        let (sim, folder) = node();
        let api = Api::default();
        let web = pod("web").restarted("Never").running("main", "exit 0 5s").from_api();
        let first = api.put(&web.build());
        let start = |pod| Agent::start_limiting_dead_containers(&sim, folder.path(), vec![pod], policy, &api);
        let agent = start(first);
        let phase = || api.pod("web").and_then(|pod| pod.status.as_ref()?.phase.clone());
        sleep(secs(130)).await;
        assert_eq!((phase().as_deref(), remaining(&sim)), (Some("Succeeded"), vec![0]), "the agent has not seen it");
        agent.update(api.pod("web").expect("the pod")).await;
        sleep(secs(65)).await;
        assert_eq!(remaining(&sim), [0; 0], "{}", sim.trace(Trace::to_string));
        let ended = api.pod("web").expect("the pod");
        drop(agent);
        sleep(secs(1)).await;
        let _agent = start(ended.clone());
        sleep(secs(130)).await;
        let attempts = sim.trace(|l| l.history("web", "main").count());
        assert_eq!((attempts, api.pod("web")), (1, Some(ended)), "{}", sim.trace(Trace::to_string));
    }
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

fn lists_of_images(sim: &SimRuntime) -> u64 {
    sim.trace(|l| l.count(Method::ListImages) + l.count(Method::StreamImages))
}

/// Which images are in use is observed every five minutes, however many pods end in between.
#[tokio::test(start_paused = true)]
async fn images_are_not_listed_when_pods_end() {
    let (sim, folder) = node();
    let pods = ["a", "b", "c"].map(|name| pod(name).running("main", "run").build());
    let agent = start(&sim, folder.path(), pods.to_vec());
    let all_run = |l: &Trace| l.live_count() == 3;
    sim.until("all run", SOON, all_run).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sleep(secs(5)).await;
    let before = lists_of_images(&sim);
    assert!(before > 0, "observed when the agent starts");
    for pod in pods {
        agent.remove(pod).await;
        sleep(secs(40)).await;
    }
    let left: usize = ["a", "b", "c"].map(|name| sim.sandboxes(name).len()).iter().sum();
    assert_eq!((left, lists_of_images(&sim)), (0, before), "{}", sim.trace(Trace::to_string));
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
    let lists = lists_of_images(&sim);
    assert!((12..=13).contains(&lists), "{lists} lists in an hour");
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
