//! The agent while calls fail or hang, events are late or lost, and agent, sandboxes or runtime end.

use keblet::model::PodUid;
use keblet::status::TerminationReason;
use keblet_proto::cri::v1;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use tokio::time::Instant;
use tokio::time::sleep;
use tonic::Code;

use super::Node;
use super::ms;
use super::secs;

/// F1: a start whose call timed out in the agent, but succeeded in the runtime.
#[tokio::test(start_paused = true)]
async fn f01_late_successful_start_is_not_repeated() {
    for fault in [
        FaultKind::HangAfter,
        FaultKind::Slow(secs(130)),
        FaultKind::FailAfter(Code::Unknown, "simulated".to_owned()),
        FaultKind::LateAnswer(secs(125)),
    ] {
        let node = Node::new();
        node.sim.faults(|f| f.add(CallFault::on(Method::StartContainer, fault.clone()).times(1)));
        let _agent = node.start(SensorSet::ALL, [pod("web").running("main", "run")]);
        node.running("web", "main").await;
        sleep(secs(600)).await;
        node.no_duplicates();
        assert_eq!(node.sim.trace(Trace::live_count), 1, "{fault:?}");
    }
}

/// F1: a container of a start that failed in the end does not block the next start.
#[tokio::test(start_paused = true)]
async fn f01_failed_start_is_retried() {
    for (method, code) in [(Method::StartContainer, Code::Unknown), (Method::CreateContainer, Code::Unavailable)] {
        let node = Node::new();
        node.sim.faults(|f| f.add(CallFault::on(method, FaultKind::Fail(code, "simulated".to_owned())).times(1)));
        let _agent = node.start(SensorSet::ALL, [pod("web").running("main", "run")]);
        node.running("web", "main").await;
        sleep(secs(60)).await;
        node.no_duplicates();
        assert_eq!(node.sim.trace(Trace::live_count), 1, "{method:?}");
    }
}

/// F1: the agent was killed during StartContainer, and containerd recorded that as the end of a container that never ran.
#[tokio::test(start_paused = true)]
async fn f01_a_cancelled_start_is_no_end_of_the_container() {
    let cancelled = Program::cannot_start("failed to start containerd task \"main\": context canceled: unknown");
    for web in
        [pod("web").running("main", "exit 0 5s"), pod("web").after("main", "exit 0 5s").running("last", "exit 0")]
    {
        let ((sim, folder), api) = (node(), Api::default());
        sim.script("web", "main", Some(0), cancelled.clone());
        let web = api.put(&web.restarted("Never").from_api().build());
        let _agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
        sleep(secs(60)).await;
        let phases = api.phases_sent("web");
        assert_eq!(phases.last().map(String::as_str), Some("Succeeded"), "{}", sim.trace(Trace::to_string));
        assert!(!phases.iter().any(|phase| phase == "Failed"), "{phases:?}");
    }
}

/// F1: a start that is cancelled each time, such as one that takes longer than its call may, is held back more and more.
#[tokio::test(start_paused = true)]
async fn f01_starts_that_are_always_cancelled_are_backed_off() {
    let ((sim, folder), api) = (node(), Api::default());
    sim.script("web", "main", None, Program::cannot_start("context canceled"));
    let web = api.put(&pod("web").running("main", "run").restarted("Never").from_api().build());
    let _agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    sleep(secs(600)).await;
    let starts = sim.trace(|trace| trace.count(Method::StartContainer));
    assert!((4..=10).contains(&starts), "{starts} starts: {}", sim.trace(Trace::to_string));
    assert!(!api.phases_sent("web").iter().any(|phase| phase == "Failed"));
}

/// F1, the worst case: the CREATED event is delivered, STARTED is late or lost, the start is slow, many static pods
/// start at the same time.
#[tokio::test(start_paused = true)]
async fn f01_no_duplicates_when_events_lag_behind_starts() {
    for sensors in [SensorSet::ALL, SensorSet::EVENTS] {
        let node = Node::new();
        node.sim.faults(|f| {
            f.events = EventFaults { late: 0.8, late_by: secs(4), lost: 0.3, doubled: 0.3, ..EventFaults::default() };
            f.add(CallFault::on(Method::StartContainer, FaultKind::Slow(ms(700))).with_probability(0.5));
            f.add(CallFault::on(Method::StartContainer, FaultKind::LateAnswer(ms(900))).with_probability(0.3));
        });
        let pods = (0..20).map(|n| pod(&format!("p{n}")).running("main", "exit 1 2s until 2"));
        let _agent = node.start(sensors, pods);
        let all = |l: &Trace| (0..20).all(|n| l.live(&format!("p{n}"), "main").is_some_and(|i| i.attempt >= 2));
        // A lost exit that no other sensor reports waits for the next relist.
        node.sim
            .until("all settled", secs(3000), all)
            .await
            .unwrap_or_else(|timed_out| panic!("{sensors:?}: {timed_out}"));
        node.no_duplicates();
        let starts = node.sim.trace(|l| l.instances().iter().filter(|i| i.started.is_some()).count());
        assert_eq!(starts, 60, "{sensors:?}: three instances each");
    }
}

/// F2 and design rule 5: a restarted agent changes no container, however slowly the runtime responds.
#[tokio::test(start_paused = true)]
async fn f02_restarted_agent_changes_no_container() {
    for slow in [ms(0), secs(7)] {
        let node = Node::new();
        let pods = || (0..10).map(|n| pod(&format!("p{n}")).running("main", "run").running("side", "run"));
        let agent = node.start(SensorSet::ALL, pods());
        node.sim.until("all up", secs(60), |l| l.live_count() == 20).await.expect("up");
        sleep(secs(3)).await;
        drop(agent);
        let acts = |l: &Trace| -> u64 { l.counts().iter().filter(|(m, _)| m.acts()).map(|(_, n)| n).sum() };
        let before = node.sim.trace(acts);
        node.sim.faults(|f| {
            f.add(CallFault::on(Method::ContainerStatus, FaultKind::Slow(slow)));
            f.add(CallFault::on(Method::ListContainers, FaultKind::Slow(slow)));
        });
        let _agent = node.start(SensorSet::ALL, pods());
        sleep(secs(120)).await;
        assert_eq!(node.sim.trace(acts), before, "{}", node.sim.trace(Trace::to_string));
        assert_eq!(node.sim.trace(Trace::live_count), 20);
    }
}

/// Design rule 5 at every step: the agent is killed after each single call of a start, a restart and a removal.
#[tokio::test(start_paused = true)]
async fn agent_killed_at_any_call_creates_no_duplicates() {
    for step in 0.. {
        let node = Node::new();
        let desired = || {
            let init = pod("init").after("first", "exit 0 50ms").running("main", "run");
            [init, pod("crash").running("main", "exit 1 200ms until 1")]
        };
        let agent = node.start(SensorSet::ALL, desired());
        let calls = node.sim.until("that many calls", secs(20), |l| l.total() > step).await;
        drop(agent);
        let _agent = node.start(SensorSet::ALL, desired());
        let settled =
            |l: &Trace| l.live("init", "main").is_some() && l.live("crash", "main").is_some_and(|i| i.attempt > 0);
        node.sim
            .until("settled", secs(120), settled)
            .await
            .unwrap_or_else(|timed_out| panic!("step {step}: {timed_out}"));
        sleep(secs(60)).await;
        node.no_duplicates();
        assert_eq!(node.sim.trace(Trace::live_count), 2, "step {step}");
        assert!(node.attempts("crash", "main").len() <= 3, "step {step}: {:?}", node.attempts("crash", "main"));
        // A start in progress when the agent was killed may be abandoned and repeated, but there are never two
        // instances.
        assert!(node.attempts("init", "main").len() <= 2, "step {step}: {:?}", node.attempts("init", "main"));
        if calls.is_err() {
            assert!(step > 20, "the start-up took more than {step} calls");
            return;
        }
    }
}

/// F9: a pod whose sandbox exited gets a new one; restart counts continue; late events of the old one are ignored.
#[tokio::test(start_paused = true)]
async fn f09_dead_sandbox_is_replaced_and_restart_counts_continue() {
    let node = Node::new();
    node.sim.faults(|f| f.events = EventFaults { late: 0.5, late_by: secs(3), ..EventFaults::default() });
    let _agent =
        node.start(SensorSet::ALL, [pod("web").running("main", "exit 1 500ms until 1").running("side", "run")]);
    node.sim
        .until("second instance", secs(60), |l| l.live("web", "main").is_some_and(|i| i.attempt == 1))
        .await
        .expect("up");
    sleep(secs(5)).await;
    assert_eq!(node.sim.kill_sandboxes("web"), 1);
    let again = |l: &Trace| {
        l.live("web", "main").is_some_and(|i| i.attempt == 2) && l.live("web", "side").is_some_and(|i| i.attempt == 1)
    };
    node.sim.until("both in a new sandbox", secs(120), again).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    sleep(secs(30)).await;
    node.no_duplicates();
    let ready = |s: &v1::PodSandboxStatus| s.state() == v1::PodSandboxState::SandboxReady;
    assert_eq!(node.sim.sandboxes("web").iter().filter(|s| ready(s)).count(), 1);
    assert_eq!(node.sim.trace(Trace::live_count), 2);
}

/// A sandbox that ends as soon as it is there, as one whose virtual machine crashes: back-off holds the containers, and the
/// sandbox is replaced no more often than by a kubelet, which lists sandboxes once a second.
#[tokio::test(start_paused = true)]
async fn sandbox_that_ends_at_once_is_not_replaced_without_a_pause() {
    let node = Node::new();
    let created = sandboxes_in_a_minute(&node).await;
    assert!((10..=61).contains(&created), "{created} in a minute");
    assert!(node.sim.sandboxes("web").len() <= 4, "{} are left", node.sim.sandboxes("web").len());
    node.no_duplicates();
}

/// A sandbox that ends while a container is created in it, as one whose virtual machine crashes.
#[tokio::test(start_paused = true)]
async fn sandbox_that_ends_after_a_failure_is_replaced_with_growing_pauses() {
    let node = Node::new();
    let refused = FaultKind::Fail(Code::Unknown, "no connection to the virtual machine".to_owned());
    node.sim.faults(|f| f.add(CallFault::on(Method::CreateContainer, refused)));
    let created = sandboxes_in_a_minute(&node).await;
    assert!((5..=20).contains(&created), "{created} in a minute");
}

/// The number of sandboxes that are created for a pod whose sandboxes end at once.
async fn sandboxes_in_a_minute(node: &Node) -> u64 {
    let _agent = node.start(SensorSet::ALL, [pod("web").running("main", "run")]);
    let begin = Instant::now();
    while begin.elapsed() < secs(60) {
        node.sim.kill_sandboxes("web");
        sleep(ms(10)).await;
    }
    node.sim.trace(|l| l.count(Method::RunPodSandbox))
}

/// F12: the runtime restarts under running pods, and some containers are killed meanwhile.
#[tokio::test(start_paused = true)]
async fn f12_runtime_restart_restarts_only_exited_containers() {
    for recovery in [Recovery::default(), Recovery { lose_exit_codes: true, replay_events: 30 }] {
        let node = Node::new();
        let agent = node.start(SensorSet::ALL, (0..20).map(|n| pod(&format!("p{n}")).running("main", "run")));
        node.sim.until("all up", secs(60), |l| l.live_count() == 20).await.expect("up");
        sleep(secs(10)).await;
        node.sim.go_down();
        let killed: Vec<String> = (0..6).map(|n| format!("p{}", n * 3)).collect();
        let ids: Vec<String> =
            killed.iter().map(|p| node.sim.kill(p, "main", Exit::Code(1)).expect("alive").id).collect();
        sleep(secs(8)).await;
        node.sim.come_up(recovery);
        node.sim.until("all up again", secs(60), |l| l.live_count() == 20).await.unwrap_or_else(|u| panic!("{u}"));
        sleep(secs(30)).await;
        node.no_duplicates();
        for n in 0..20 {
            let name = format!("p{n}");
            let expected: &[u32] = if killed.contains(&name) { &[0, 1] } else { &[0] };
            assert_eq!(node.attempts(&name, "main"), expected, "{name}");
        }
        assert_eq!(ids.iter().map(|id| agent.harness.seen.exit_count(id)).collect::<Vec<_>>(), [1; 6]);
    }
}

/// F12: the status shows exits that the kernel proves, since endpoints of services depend on it.
#[tokio::test(start_paused = true)]
async fn exits_are_shown_while_the_runtime_does_not_answer() {
    let node = Node::new();
    let web = pod("web").running("main", "run").running("side", "run");
    let once = pod("once").restarted("Never").running("main", "run");
    let agent = node.start(SensorSet::ALL, [web, once]);
    for (pod, container) in [("web", "main"), ("web", "side"), ("once", "main")] {
        node.running(pod, container).await;
    }
    sleep(secs(10)).await;
    node.sim.go_down();
    sleep(secs(5)).await;
    let code = |pod: &str, container: &str| {
        let status = agent.statuses.get(&PodUid::from(format!("{pod}-uid"))).expect("a status");
        let of = status.container_statuses.iter().flatten().find(|of| of.name == container)?;
        Some(of.state.as_ref()?.terminated.as_ref()?.exit_code)
    };
    for (pod, container) in [("web", "main"), ("web", "side"), ("once", "main")] {
        assert_eq!(code(pod, container), None);
        let killed = Instant::now();
        node.sim.kill(pod, container, Exit::Code(3)).expect("alive");
        while code(pod, container) != Some(3) {
            assert!(killed.elapsed() < secs(1), "{pod}/{container}: {:?}", code(pod, container));
            sleep(ms(10)).await;
        }
    }
    node.sim.come_up(Recovery::default());
    node.running("web", "main").await;
    node.running("web", "side").await;
    sleep(secs(30)).await;
    node.no_duplicates();
    assert_eq!((node.attempts("web", "main"), node.attempts("web", "side")), (vec![0, 1], vec![0, 1]));
    assert_eq!(node.attempts("once", "main"), [0]);
    let once = agent.statuses.get(&PodUid::from("once-uid")).expect("a status");
    assert_eq!(once.phase.as_deref(), Some("Failed"));
}

/// F12: also of a pod whose stop has failed, or is requested, while the runtime does not answer.
#[tokio::test(start_paused = true)]
async fn exits_of_terminating_pods_are_shown_while_the_runtime_does_not_answer() {
    for is_stopped_before in [true, false] {
        let node = Node::new();
        let web = pod("web").own_network().running("main", "term ignore").running("side", "term ignore");
        let agent = node.start(SensorSet::ALL, [web]);
        for container in ["main", "side"] {
            node.running("web", container).await;
        }
        sleep(secs(10)).await;
        let uid = PodUid::from("web-uid");
        let code = |container: &str| {
            let status = agent.statuses.get(&uid).expect("a status");
            let of = status.container_statuses.iter().flatten().find(|of| of.name == container)?;
            Some(of.state.as_ref()?.terminated.as_ref()?.exit_code)
        };
        let ending = TerminationReason { reason: "Terminated", message: "shutdown".to_owned(), disruption: None };
        let stopping = async {
            sleep(secs(if is_stopped_before { 0 } else { 10 })).await;
            agent.kill(uid.clone(), 60, ending).await;
        };
        let failing = async {
            sleep(secs(5)).await;
            node.sim.go_down();
            sleep(secs(20)).await;
            for container in ["main", "side"] {
                assert_eq!(code(container), None);
                let killed = Instant::now();
                node.sim.kill("web", container, Exit::Code(3)).expect("alive");
                while code(container) != Some(3) {
                    assert!(killed.elapsed() < secs(1), "{container}, {is_stopped_before}: {:?}", code(container));
                    sleep(ms(10)).await;
                }
            }
            node.sim.come_up(Recovery::default());
        };
        tokio::join!(stopping, failing);
        assert_eq!((code("main"), code("side")), (Some(3), Some(3)));
        node.no_duplicates();
    }
}

/// As through a proxy that drops all events, without those of the kernel.
#[tokio::test(start_paused = true)]
async fn f12_exit_is_noticed_soon_although_the_event_stream_is_silent() {
    let node = Node::new();
    node.sim.faults(|f| f.events.lost = 1.0);
    let _agent = node.start(SensorSet::EVENTS, [pod("web").running("main", "run")]);
    node.running("web", "main").await;
    sleep(secs(60)).await;
    let killed = Instant::now();
    node.sim.kill("web", "main", Exit::Code(1)).expect("alive");
    while node.attempts("web", "main") != [0, 1] {
        assert!(killed.elapsed() < secs(5), "not restarted");
        sleep(ms(10)).await;
    }
}

/// The worker's own inspection reports the exit, at a moment when the worker has already decided to do nothing.
#[tokio::test(start_paused = true)]
async fn exit_during_container_cleanup_is_handled() {
    let node = Node::new();
    // The first removal fails, so that it is retried while the third instance runs. Events report no exit by
    // themselves.
    node.sim.faults(|f| {
        f.events.bare = 1.0;
        f.add(CallFault::on(Method::RemoveContainer, FaultKind::Slow(ms(3300))));
        f.add(CallFault::on(Method::RemoveContainer, FaultKind::Fail(Code::Unknown, "not now".to_owned())).times(1));
    });
    let _agent = node.start(SensorSet::EVENTS, [pod("web").running("main", "exit 1 3s until 2")]);
    let begin = Instant::now();
    while node.sim.trace(|l| l.count(Method::RemoveContainer)) < 2 {
        assert!(begin.elapsed() < secs(300), "no retry: {}", node.sim.trace(Trace::to_string));
        sleep(ms(10)).await;
    }
    // So late that the PLEG leaves the inspection to the worker.
    sleep(ms(2800)).await;
    let third = node.sim.kill("web", "main", Exit::Code(1)).expect("a third instance");
    assert_eq!(third.attempt, 2);
    let removed = |l: &Trace| l.history("web", "main").next().is_some_and(|i| i.removed.is_some());
    node.sim.until("the first instance is removed", secs(5), removed).await.unwrap_or_else(|u| panic!("{u}"));
    let reported = node.sim.trace(|l| l.instance(&third.id).is_some_and(|i| i.reported.is_some()));
    assert!(reported, "the removal ended at the wrong moment: {}", node.sim.trace(Trace::to_string));
    let fourth = |l: &Trace| l.live("web", "main").is_some_and(|i| i.attempt == 3);
    node.sim.until("the fourth instance", secs(60), fourth).await.unwrap_or_else(|u| panic!("{u}"));
}

/// CRI-O reports an exit before it knows its code. What the status of a terminated pod says is final.
#[tokio::test(start_paused = true)]
async fn terminated_pod_shows_the_code_that_the_runtime_learns_late() {
    for web in [pod("web"), pod("web").own_network()] {
        let node = Node::new();
        let agent = node.start(SensorSet::EVENTS, [web.running("main", "term 1s")]);
        node.running("web", "main").await;
        node.sim.withhold_exit_codes();
        let uid = PodUid::from("web-uid");
        let ending = TerminationReason { reason: "Terminated", message: "shutdown".to_owned(), disruption: None };
        let learning = async {
            sleep(secs(4)).await;
            node.sim.learn_exit_codes();
        };
        tokio::join!(agent.kill(uid.clone(), 5, ending), learning);
        let status = agent.statuses.get(&uid).expect("a status");
        let containers = status.container_statuses.iter().flatten();
        let ends = containers.map(|of| of.state.as_ref()?.terminated.as_ref()).collect::<Option<Vec<_>>>();
        let codes: Vec<i32> = ends.expect("it has ended").iter().map(|end| end.exit_code).collect();
        assert_eq!(codes, [0]);
    }
}

#[tokio::test(start_paused = true)]
async fn hung_runtime_call_delays_only_its_own_pod() {
    for method in [Method::StartContainer, Method::ContainerStatus, Method::RunPodSandbox, Method::StopContainer] {
        let node = Node::new();
        node.sim.faults(|f| f.add(CallFault::on(method, FaultKind::Hang).about("stuck_default_").times(3)));
        let pods = (0..5).map(|n| pod(&format!("p{n}")).running("main", "exit 1 15s until 1"));
        let begin = Instant::now();
        let _agent = node.start(SensorSet::ALL, pods.chain([pod("stuck").running("main", "run")]));
        let others = |l: &Trace| (0..5).all(|n| l.live(&format!("p{n}"), "main").is_some_and(|i| i.attempt == 1));
        node.sim
            .until("the other pods are restarted", secs(20), others)
            .await
            .unwrap_or_else(|u| panic!("{method:?}: {u}"));
        assert!(begin.elapsed() < secs(17), "{method:?}: {:?}", begin.elapsed());
        node.sim.faults(Faults::clear);
        node.running("stuck", "main").await;
        node.no_duplicates();
    }
}
