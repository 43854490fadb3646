//! The whole agent on the simulated node, checked against the runtime's trace.

mod faults;
mod panics;

use std::path::Path;
use std::time::Duration;

use keblet::model::PodUid;
use keblet::status::TerminationReason;
use keblet_proto::cri::v1;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::PodOf;
use keblet_tests::node::Seen;
use keblet_tests::node::SensorSet;
use keblet_tests::node::folder;
use keblet_tests::node::pod;
use tempfile::TempDir;
use tokio::time::Instant;
use tokio::time::sleep;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

struct Node {
    sim: SimRuntime,
    folder: TempDir,
}

impl Node {
    fn new() -> Self {
        Self::with(Options::default())
    }

    fn with(options: Options) -> Self {
        let sim = SimRuntime::new(options);
        sim.images(|images| images.store("busybox", 1 << 20));
        Self { sim, folder: folder() }
    }

    fn root(&self) -> &Path {
        self.folder.path()
    }

    fn start(&self, sensors: SensorSet, pods: impl IntoIterator<Item = PodOf>) -> Agent {
        Agent::start(&self.sim, sensors, self.root(), pods.into_iter().map(PodOf::build).collect())
    }

    async fn running(&self, pod: &str, container: &str) {
        let live = |l: &Trace| l.live(pod, container).is_some();
        if let Err(timed_out) = self.sim.until(&format!("{pod}/{container} runs"), secs(900), live).await {
            panic!("{timed_out}");
        }
    }

    /// Waits until the runtime has nothing left of the pod.
    async fn sandbox_removed(&self, pod: &str) {
        let begin = Instant::now();
        while !self.sim.sandboxes(pod).is_empty() {
            assert!(begin.elapsed() < secs(30), "{}", self.sim.trace(Trace::to_string));
            sleep(ms(10)).await;
        }
    }

    /// Attempts of one container, in the order they were started.
    fn attempts(&self, pod: &str, container: &str) -> Vec<u32> {
        self.sim.trace(|l| l.history(pod, container).filter(|i| i.started.is_some()).map(|i| i.attempt).collect())
    }

    fn no_duplicates(&self) {
        self.sim.trace(|l| {
            assert!(l.duplicates().is_empty(), "{:#?}\n{l}", l.duplicates());
            assert!(l.fallen_attempts().is_empty(), "{:#?}\n{l}", l.fallen_attempts());
        });
    }

    /// Time from the exit of one attempt to the start of the next.
    fn gap(&self, pod: &str, container: &str, attempt: u32) -> Duration {
        self.sim.trace(|l| {
            let of = |n: u32| l.history(pod, container).find(|i| i.attempt == n).expect("that attempt");
            let (exited_at, _) = of(attempt).exited.expect("exited");
            of(attempt + 1).started.expect("started") - exited_at
        })
    }
}

#[tokio::test(start_paused = true)]
async fn running_pod_needs_no_runtime_calls() {
    let node = Node::new();
    let _agent = node.start(SensorSet::ALL, [pod("web").running("main", "run").running("side", "run")]);
    node.running("web", "main").await;
    node.running("web", "side").await;
    sleep(secs(5)).await;
    let before = node.sim.trace(|l| (l.total(), l.clone()));
    sleep(secs(250)).await;
    let status_calls = node.sim.trace(|l| l.count(Method::Status)) - before.1.count(Method::Status);
    let calls = node.sim.trace(Trace::total) - before.0 - status_calls;
    assert_eq!(calls, 0, "{}", node.sim.trace(Trace::to_string));
    assert_eq!(node.attempts("web", "main"), [0]);
}

/// F3: a restart after a crash takes what the runtime needs to create and start a container, without waiting for the
/// runtime's report of the exit.
#[tokio::test(start_paused = true)]
async fn crashed_container_restarts_before_the_runtime_reports_the_exit() {
    for (sensors, most) in [(SensorSet::ALL, 60), (SensorSet::EVENTS, 115), (SensorSet::LISTS, 1400)] {
        let node = Node::new();
        let _agent = node.start(sensors, [pod("web").running("main", "exit 1 20s until 1")]);
        node.running("web", "main").await;
        sleep(secs(30)).await;
        assert_eq!(node.attempts("web", "main"), [0, 1]);
        let gap = node.gap("web", "main", 0);
        assert!(gap <= ms(most), "{sensors:?}: {gap:?}");
        node.no_duplicates();
    }
}

#[tokio::test(start_paused = true)]
async fn init_containers_start_without_extra_delay() {
    for (sensors, most) in [(SensorSet::ALL, 500), (SensorSet::EVENTS, 700)] {
        let node = Node::new();
        let chain = pod("chain").after("one", "exit 0").after("two", "exit 0").after("three", "exit 0");
        let begin = Instant::now();
        let _agent = node.start(sensors, [chain.after("four", "exit 0").running("main", "run")]);
        node.running("chain", "main").await;
        assert!(begin.elapsed() <= ms(most), "{sensors:?}: {:?}", begin.elapsed());
        let order: Vec<String> = node.sim.trace(|l| l.instances().iter().map(|i| i.container.clone()).collect());
        assert_eq!(order, ["one", "two", "three", "four", "main"]);
    }
}

/// F3: sync, terminating, terminated, without waiting for events or ticks in between.
#[tokio::test(start_paused = true)]
async fn f03_removed_pod_terminates_without_waiting() {
    let node = Node::new();
    let web = pod("web").running("main", "term 10ms");
    let agent = node.start(SensorSet::ALL, [web.clone()]);
    node.running("web", "main").await;
    let begin = Instant::now();
    agent.remove(web.build()).await;
    let removed = |l: &Trace| l.history("web", "main").all(|i| i.removed.is_some());
    node.sim.until("removed", secs(30), removed).await.expect("removed");
    assert!(begin.elapsed() < ms(400), "{:?}", begin.elapsed());
    sleep(secs(5)).await;
    assert!(node.sim.sandboxes("web").is_empty(), "{:?}", node.sim.sandboxes("web"));
}

/// The API object of a deleted pod waits for the sandbox only if the sandbox has an address or host ports. What was not
/// waited for is removed afterwards.
#[tokio::test(start_paused = true)]
async fn deleted_host_network_pod_is_finished_before_sandbox_teardown() {
    let host = pod("web").running("main", "term 10ms").running("side", "term 20ms").from_api();
    for (web, early) in [(host.clone(), true), (host.own_network(), false)] {
        let node = Node::new();
        let agent = node.start(SensorSet::ALL, [web.clone()]);
        node.running("web", "main").await;
        node.running("web", "side").await;
        sleep(secs(2)).await;
        node.sim.faults(|f| f.add(CallFault::on(Method::StopPodSandbox, FaultKind::Slow(ms(200)))));
        let begin = Instant::now();
        agent.update(web.deleting().build()).await;
        let stored = || agent.statuses.stored(&PodUid::from("web-uid"));
        while stored().is_none_or(|stored| !stored.is_finished) {
            assert!(begin.elapsed() < secs(5), "{}", node.sim.trace(Trace::to_string));
            sleep(ms(1)).await;
        }
        assert_eq!(node.sim.trace(Trace::live_count), 0);
        let ready = v1::PodSandboxState::SandboxReady as i32;
        assert_eq!(node.sim.sandboxes("web").iter().any(|sandbox| sandbox.state == ready), early);
        assert!(!early || begin.elapsed() < ms(100), "{:?}", begin.elapsed());
        let containers = stored().and_then(|stored| stored.status.container_statuses.clone()).unwrap_or_default();
        let codes: Vec<_> = containers.iter().filter_map(|c| c.state.as_ref()?.terminated.as_ref()).collect();
        assert_eq!(codes.len(), 2, "{containers:?}");
        node.sandbox_removed("web").await;
    }
}

/// An agent that is killed after its pod is finished and before its sandbox is stopped: the next one knows the pod from the
/// runtime alone.
#[tokio::test(start_paused = true)]
async fn sandbox_teardown_continues_after_agent_restart() {
    let node = Node::new();
    let web = pod("web").running("main", "term 10ms").from_api();
    let agent = node.start(SensorSet::ALL, [web.clone(), pod("stays").running("main", "run")]);
    node.running("web", "main").await;
    node.running("stays", "main").await;
    sleep(secs(2)).await;
    node.sim.faults(|f| f.add(CallFault::on(Method::StopPodSandbox, FaultKind::Hang)));
    agent.update(web.deleting().build()).await;
    node.sim
        .until("exited", secs(5), |l| l.live("web", "main").is_none())
        .await
        .unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sleep(ms(100)).await;
    assert!(agent.statuses.stored(&PodUid::from("web-uid")).is_some_and(|stored| stored.is_finished));
    drop(agent);
    node.sim.faults(Faults::clear);
    assert!(!node.sim.sandboxes("web").is_empty());
    let _agent = node.start(SensorSet::ALL, [pod("stays").running("main", "run")]);
    node.sandbox_removed("web").await;
    assert_eq!(node.attempts("stays", "main"), [0]);
}

#[tokio::test(start_paused = true)]
async fn container_ignoring_sigterm_is_killed_after_the_grace_period() {
    let node = Node::new();
    let web = pod("web").running("main", "term ignore");
    let agent = node.start(SensorSet::ALL, [web.clone()]);
    node.running("web", "main").await;
    let begin = Instant::now();
    agent.remove(web.build()).await;
    node.sim.until("exited", secs(30), |l| l.live_count() == 0).await.expect("exited");
    assert!((secs(5)..secs(6)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn crash_loops_back_off() {
    let node = Node::new();
    let _agent = node.start(SensorSet::ALL, [pod("web").running("main", "exit 1 1s until 4")]);
    node.sim
        .until("fifth instance", secs(300), |l| l.live("web", "main").is_some_and(|i| i.attempt == 4))
        .await
        .expect("up");
    let gaps: Vec<u64> = (0..4).map(|attempt| node.gap("web", "main", attempt).as_secs()).collect();
    assert_eq!(gaps, [0, 10, 20, 40]);
    node.no_duplicates();
}

#[tokio::test(start_paused = true)]
async fn shared_pid_namespace_restarts_only_after_the_runtime_report() {
    let node = Node::new();
    let _agent = node.start(SensorSet::ALL, [pod("host").host_pid().running("main", "exit 1 20s until 1 fork")]);
    node.running("host", "main").await;
    sleep(secs(30)).await;
    assert_eq!(node.attempts("host", "main"), [0, 1]);
    node.no_duplicates();
    assert!(node.gap("host", "main", 0) >= ms(45), "{:?}", node.gap("host", "main", 0));
}

/// A new UID under the old name waits until the old pod is removed, then starts at once.
#[tokio::test(start_paused = true)]
async fn edited_static_pod_replaces_the_previous_one() {
    let node = Node::new();
    let old = pod("web").running("main", "term 1s");
    let agent = node.start(SensorSet::ALL, [old.clone()]);
    node.running("web", "main").await;
    let begin = Instant::now();
    agent.remove(old.build()).await;
    agent.add(pod("web").uid("web-uid-2").running("main", "run").build()).await;
    let new_runs = |l: &Trace| l.live("web", "main").is_some_and(|i| i.pod_uid == "web-uid-2");
    node.sim.until("the new one runs", secs(30), new_runs).await.unwrap_or_else(|u| panic!("{u}"));
    assert!(begin.elapsed() < ms(1700), "{:?}", begin.elapsed());
    let overlap = node.sim.trace(|l| {
        let exited = l.history("web", "main").find(|i| i.pod_uid == "web-uid").and_then(|i| i.gone).expect("exited");
        l.live("web", "main").and_then(|i| i.started).expect("started") < exited
    });
    assert!(!overlap, "both ran at the same time");
}

#[tokio::test(start_paused = true)]
async fn restart_policies_are_honoured() {
    let node = Node::new();
    let never = pod("never").restarted("Never").running("main", "exit 3 1s");
    let failure =
        pod("failure").restarted("OnFailure").running("good", "exit 0 1s").running("bad", "exit 1 1s until 2");
    let always = pod("always").running("main", "exit 0 1s until 2");
    let _agent = node.start(SensorSet::ALL, [never, failure, always]);
    sleep(secs(120)).await;
    assert_eq!(node.attempts("never", "main"), [0]);
    assert_eq!(node.attempts("failure", "good"), [0]);
    assert_eq!(node.attempts("failure", "bad"), [0, 1, 2]);
    assert_eq!(node.attempts("always", "main"), [0, 1, 2]);
}

#[tokio::test(start_paused = true)]
async fn undesired_pod_is_terminated_by_the_next_agent() {
    let node = Node::new();
    let agent = node.start(SensorSet::ALL, [pod("stays").running("main", "run"), pod("goes").running("main", "run")]);
    node.running("stays", "main").await;
    node.running("goes", "main").await;
    sleep(secs(1)).await;
    drop(agent);
    let _agent = node.start(SensorSet::ALL, [pod("stays").running("main", "run")]);
    let ended = |l: &Trace| l.live("goes", "main").is_none();
    node.sim.until("ended", secs(30), ended).await.unwrap_or_else(|u| panic!("{u}"));
    assert_eq!(node.attempts("stays", "main"), [0]);
}

/// Every exit is reported once, whichever sensor reports it, and restart counts follow.
#[tokio::test(start_paused = true)]
async fn every_exit_is_reported_exactly_once() {
    let node = Node::new();
    let seen = Seen::default();
    let pods = (0..10).map(|n| pod(&format!("p{n}")).running("main", "exit 1 3s until 3").build()).collect();
    let _agent = Agent::start_observed(&node.sim, SensorSet::ALL, node.root(), pods, seen.clone());
    let done = |l: &Trace| (0..10).all(|n| l.live(&format!("p{n}"), "main").is_some_and(|i| i.attempt == 3));
    node.sim.until("fourth instances", secs(300), done).await.unwrap_or_else(|u| panic!("{u}"));
    sleep(secs(5)).await;
    let exits: Vec<usize> = node
        .sim
        .trace(|l| l.instances().iter().filter(|i| i.exited.is_some()).map(|i| seen.exit_count(&i.id)).collect());
    assert_eq!(exits, [1; 30]);
}

/// Calls to the runtime in ten minutes of 100 and of 1,000 idle pods.
#[tokio::test(start_paused = true)]
async fn idle_runtime_calls_do_not_grow_with_pod_count() {
    let mut per_ten_minutes = Vec::new();
    for count in [100_usize, 1000] {
        let node = Node::new();
        let _agent = node.start(SensorSet::ALL, (0..count).map(|n| pod(&format!("p{n}")).running("main", "run")));
        node.sim.until("all up", secs(600), |l| l.live_count() == count).await.expect("up");
        sleep(secs(30)).await;
        let before = node.sim.trace(Trace::total);
        sleep(secs(600)).await;
        per_ten_minutes.push(node.sim.trace(Trace::total) - before);
    }
    // Ten Status calls, two relists and two observations of images of two lists each: 1.8 calls per minute, whatever the
    // number of pods.
    assert!(per_ten_minutes[1] <= per_ten_minutes[0] && per_ten_minutes[0] <= 18, "{per_ten_minutes:?}");
}

/// KEP-2000: pods terminate within the shutdown's period, their status has the reason, and new pods are rejected.
#[tokio::test(start_paused = true)]
async fn node_shutdown_terminates_pods_and_rejects_new_ones() {
    let node = Node::new();
    let (web, late) = (pod("web").running("main", "term ignore"), pod("late").running("main", "run"));
    let agent = node.start(SensorSet::ALL, [web.clone()]);
    node.running("web", "main").await;
    agent.close();
    agent.add(late.clone().build()).await;
    let begin = Instant::now();
    let uid = PodUid::from(web.build().metadata.uid.clone().expect("a UID").as_str());
    let message = "Pod was terminated in response to imminent node shutdown.";
    let ending =
        TerminationReason { reason: "Terminated", message: message.to_owned(), disruption: Some(message.to_owned()) };
    agent.kill(uid.clone(), 5, ending).await;
    assert!(begin.elapsed() < secs(8), "its own grace period is longer: {:?}", begin.elapsed());
    let status = agent.statuses.get(&uid).expect("a status");
    assert_eq!(status.phase.as_deref(), Some("Failed"));
    assert_eq!((status.reason.as_deref(), status.message.as_deref()), (Some("Terminated"), Some(message)));
    let disrupted = status.conditions.iter().flatten().find(|condition| condition.type_ == "DisruptionTarget");
    assert_eq!(disrupted.map(|condition| condition.status.as_str()), Some("True"));
    let late = PodUid::from(late.build().metadata.uid.clone().expect("a UID").as_str());
    let rejected = agent.statuses.get(&late).expect("a status");
    assert_eq!(rejected.reason.as_deref(), Some("NodeShutdown"));
    sleep(secs(600)).await;
    assert_eq!(node.attempts("web", "main"), [0], "it is not started again");
    assert_eq!(node.attempts("late", "main"), [0_u32; 0], "it is never started");
}
