//! Exits that the kernel reports, hints that prove nothing, and inspections that fail or hang.

use keblet::model::ContainerState;
use keblet::model::LifecycleKind;
use keblet::model::OomVictim;
use keblet::model::Source;
use keblet_proto::cri::v1;
use keblet_tests::cri::client::container;
use keblet_tests::cri::client::sandbox;
use keblet_tests::cri::*;
use keblet_tests::node::Seen;
use keblet_tests::node::SensorSet;
use tokio::time::Instant;
use tokio::time::sleep;

use super::awake;
use super::cached;
use super::latency;
use super::ms;
use super::run;
use super::secs;
use super::uid;
use crate::runtime::node;

/// Naive: the inspection that repeats a worker's failed one counts as the worker's, which is not woken by its result.
#[tokio::test(start_paused = true)]
async fn retry_of_a_failed_inspection_marks_the_pod_as_changed() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::LISTS).await;
    let failure = FaultKind::Fail(tonic::Code::Unknown, "simulated".to_owned());
    sim.faults(|f| f.add(CallFault::on(Method::ContainerStatus, failure)));
    let (_, id) = run(&mut client, "web", "run").await;
    harness.pleg.inspect(&uid("web")).await.expect_err("the runtime fails");
    sim.faults(|f| f.clear());
    let changed = tokio::time::timeout(secs(60), harness.pleg.changed_pods()).await.expect("a change");
    assert_eq!(changed, [uid("web")]);
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running));
}

#[tokio::test(start_paused = true)]
async fn kernel_exit_is_reported_before_the_runtime_event() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let (_, id) = run(&mut client, "web", "exit 7 2s").await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    assert!(harness.seen.until(secs(3), |seen| seen.exit_count(&id) == 1).await);
    assert!(latency(&sim, &harness, &id) <= ms(2), "{:?}", latency(&sim, &harness, &id));
    let (_, event) = harness.seen.of(LifecycleKind::ContainerDied, &id).remove(0);
    assert_eq!((event.source, event.exit_code), (Source::Kernel, Some(7)));
    let proven = harness.pleg.cached(&uid("web")).expect("cached");
    assert!(proven.containers[0].proven.is_some() && proven.containers[0].reason.is_empty());
    sleep(secs(1)).await;
    let confirmed = harness.pleg.cached(&uid("web")).expect("cached");
    assert!(confirmed.containers[0].proven.is_none());
    assert_eq!((confirmed.containers[0].reason.as_str(), confirmed.containers[0].exit_code), ("Error", Some(7)));
}

/// Where threads of a process end at the same time, only its last record has the exit code for certain.
#[tokio::test(start_paused = true)]
async fn a_further_record_corrects_the_code_of_a_proven_exit() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    sim.set_exit_report(secs(5));
    let (_, id) = run(&mut client, "web", "exit 0 2s").await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    let mut facts = sim.kernel().subscribe();
    assert!(harness.seen.until(secs(3), |seen| seen.exit_count(&id) == 1).await);
    let cached = || harness.pleg.cached(&uid("web")).expect("cached").containers[0].clone();
    assert!(cached().proven.is_some() && cached().exit_code == Some(0), "{:?}", cached());
    assert_eq!(harness.pleg.changed_pods().await, [uid("web")]);
    let inspections = harness.seen.inspections();
    let KernelFact::Exit(first) = facts.recv().await.expect("fact") else { panic!("no OOM here") };
    sim.kernel().publish(KernelFact::Exit(ExitRecord { exit: Exit::Signal(9), ..first }));
    let changed = tokio::time::timeout(secs(1), harness.pleg.changed_pods()).await.expect("a change");
    assert_eq!((changed, cached().exit_code), (vec![uid("web")], Some(137)));
    assert_eq!(harness.seen.inspections(), inspections, "before the runtime is asked");
}

#[tokio::test(start_paused = true)]
async fn a_caller_waits_for_an_exit_no_longer_than_the_kernel_needs_to_prove_it() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let (_, id) = run(&mut client, "web", "exit 7 2s").await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    let (web, container) = (uid("web"), id.as_str().into());
    tokio::time::timeout(secs(3), harness.pleg.exit_of(&web, &container)).await.expect("an exit");
    let exited = sim.trace(|l| l.history("web", "main").next().and_then(|i| i.exited)).expect("an exit").0;
    assert!(exited.elapsed() <= ms(2), "{:?}", exited.elapsed());
    sleep(secs(1)).await;
    tokio::time::timeout(ms(1), harness.pleg.exit_of(&web, &container)).await.expect("a known exit");
    for (pod, id) in [("web", "another"), ("another", id.as_str())] {
        let (pod, container) = (uid(pod), id.into());
        let exit = harness.pleg.exit_of(&pod, &container);
        tokio::time::timeout(secs(60), exit).await.expect_err("no such container");
    }
}

#[tokio::test(start_paused = true)]
async fn exit_in_a_shared_pid_namespace_waits_for_the_runtime() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let mut config = sandbox("host", 0);
    let host = keblet_proto::cri::v1::NamespaceMode::Node.into();
    let security = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
    security.namespace_options.as_mut().expect("set").pid = host;
    let pod = client.run_sandbox(config).await.expect("sandbox");
    let mut main = container("main", 0, "exit 1 1s fork");
    let security = main.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
    security.namespace_options.as_mut().expect("set").pid = host;
    let id = client.launch(&pod, main).await.expect("launch");
    harness.pleg.inspect(&uid("host")).await.expect("view");
    assert!(harness.seen.until(secs(2), |seen| seen.exit_count(&id) == 1).await);
    let lag = latency(&sim, &harness, &id);
    assert!((ms(45)..ms(60)).contains(&lag), "not before the runtime's report: {lag:?}");
    assert!(sim.trace(|l| l.live("host", "main").is_none()), "all its processes had exited when it was reported");
}

/// The exit of an init process in a shared PID namespace proves nothing about its container. But it is a reason to
/// inspect the pod: a lost event is noticed after a second, not with the next relist.
#[tokio::test(start_paused = true)]
async fn a_lost_exit_event_in_a_shared_pid_namespace_is_noticed_by_the_pidfd() {
    use keblet_proto::cri::v1::NamespaceMode;
    for mode in [NamespaceMode::Node, NamespaceMode::Pod] {
        let (sim, mut client) = node();
        let harness = awake(&sim, SensorSet { probes: false, ..SensorSet::ALL }).await;
        let mut config = sandbox("shared", 0);
        let security = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
        security.namespace_options.as_mut().expect("set").pid = mode.into();
        let pod = client.run_sandbox(config).await.expect("sandbox");
        let mut main = container("main", 0, "exit 3 5s");
        let security = main.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
        security.namespace_options.as_mut().expect("set").pid = mode.into();
        let id = client.launch(&pod, main).await.expect("launch");
        harness.pleg.inspect(&uid("shared")).await.expect("view");
        assert_eq!(cached(&harness, "shared", &id), Some(ContainerState::Running));
        sim.faults(|f| f.events = EventFaults { lost: 1.0, ..EventFaults::default() });
        assert!(harness.seen.until(secs(8), |seen| seen.exit_count(&id) == 1).await, "{mode:?}");
        let lag = latency(&sim, &harness, &id);
        assert!((ms(45)..ms(1100)).contains(&lag), "a hint, confirmed by an inspection: {lag:?}");
        let settled = harness.seen.inspections();
        sleep(secs(120)).await;
        assert_eq!(harness.seen.inspections(), settled, "no inspection is pending");
    }
}

/// A runtime that still reports "running" after such an exit is inspected a bounded number of times.
#[tokio::test(start_paused = true)]
async fn an_exit_hint_that_the_runtime_does_not_confirm_expires() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet { probes: false, ..SensorSet::ALL }).await;
    let mut config = sandbox("shared", 0);
    let host = keblet_proto::cri::v1::NamespaceMode::Node.into();
    let security = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
    security.namespace_options.as_mut().expect("set").pid = host;
    let pod = client.run_sandbox(config).await.expect("sandbox");
    let mut main = container("main", 0, "exit 3 5s");
    let security = main.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
    security.namespace_options.as_mut().expect("set").pid = host;
    sim.set_exit_report(secs(250));
    client.launch(&pod, main).await.expect("launch");
    harness.pleg.inspect(&uid("shared")).await.expect("view");
    let before = harness.seen.inspections();
    sleep(secs(200)).await;
    let inspections = harness.seen.inspections() - before;
    assert!((3..=8).contains(&inspections), "{inspections} inspections");
}

#[tokio::test(start_paused = true)]
async fn reused_pid_does_not_prove_an_exit() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet { probes: false, ..SensorSet::ALL }).await;
    sim.set_exit_report(secs(2));
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    // Exits before the first inspection, and its PID is reused by another container while the runtime still reports it.
    let first = client.launch(&pod, container("first", 0, "exit 0 1ms")).await.expect("launch");
    let pid = sim.trace(|l| l.instance(&first).and_then(|i| i.pid)).expect("started");
    sim.kernel().wait_gone(pid).await;
    sim.kernel().reuse(pid);
    let second = client.launch(&pod, container("second", 0, "run")).await.expect("launch");
    assert_eq!(sim.trace(|l| l.instance(&second).and_then(|i| i.pid)), Some(pid));
    harness.pleg.inspect(&uid("web")).await.expect("view");
    sleep(secs(5)).await;
    assert_eq!(cached(&harness, "web", &second), Some(ContainerState::Running));
    assert_eq!((harness.seen.exit_count(&first), harness.seen.exit_count(&second)), (1, 0));
    sim.kill("web", "second", Exit::Code(1)).expect("alive");
    assert!(harness.seen.until(ms(10), |seen| seen.exit_count(&second) == 1).await, "its own exit is still proven");
}

#[tokio::test(start_paused = true)]
async fn runtime_wins_a_lasting_contradiction() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    sim.set_exit_report(secs(60));
    let (_, id) = run(&mut client, "web", "exit 1 1s").await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    assert!(harness.seen.until(secs(2), |seen| seen.exit_count(&id) == 1).await);
    sleep(secs(40)).await;
    assert_eq!(harness.seen.contradictions(), 1, "counted");
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running));
    sleep(secs(40)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Exited));
}

/// Naive: time without answers counts as contradiction, so that the first answer of a runtime that has not read the exit
/// yet shows the container as started again.
#[tokio::test(start_paused = true)]
async fn the_first_answer_after_a_long_silence_is_no_lasting_contradiction() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    sim.set_exit_report(secs(20));
    let (_, id) = run(&mut client, "web", "exit 1 1s").await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    let failure = FaultKind::Fail(tonic::Code::Unknown, "simulated".to_owned());
    sim.faults(|f| f.add(CallFault::on(Method::ListContainers, failure)));
    assert!(harness.seen.until(secs(2), |seen| seen.exit_count(&id) == 1).await);
    sleep(secs(17)).await;
    sim.faults(Faults::clear);
    harness.pleg.inspect(&uid("web")).await.expect("view");
    let proven = harness.pleg.cached(&uid("web")).expect("cached");
    assert!(proven.containers[0].proven.is_some(), "the runtime has yet to report the exit");
    sleep(secs(30)).await;
    let confirmed = harness.pleg.cached(&uid("web")).expect("cached");
    assert_eq!((confirmed.containers[0].state, confirmed.containers[0].proven), (ContainerState::Exited, None));
    assert_eq!((harness.seen.contradictions(), harness.seen.exit_count(&id)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn hung_inspection_delays_only_its_own_pod() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    sim.faults(|f| f.add(CallFault::on(Method::ContainerStatus, FaultKind::Hang).about("_stuck_")));
    let (_, stuck) = run(&mut client, "stuck", "run").await;
    let (_, other) = run(&mut client, "other", "exit 1 2s").await;
    let begin = Instant::now();
    let name = uid("stuck");
    let hung = harness.pleg.inspect(&name);
    let fine = async {
        harness.pleg.inspect(&uid("other")).await.expect("view");
        begin.elapsed()
    };
    let (hung, fine) = tokio::join!(hung, fine);
    assert!(fine < ms(20), "{fine:?}");
    assert!(begin.elapsed() >= secs(30) && hung.is_err(), "{hung:?}");
    assert_eq!(harness.seen.exit_count(&other), 1);
    sim.faults(Faults::clear);
    assert!(harness.seen.until(secs(30), |_| cached(&harness, "stuck", &stuck) == Some(ContainerState::Running)).await);
}

/// Naive: a pod without a snapshot that is not being inspected at the moment was not listed. Its worker would start it again.
#[tokio::test(start_paused = true)]
async fn a_listed_pod_that_cannot_be_inspected_is_not_shown_as_absent() {
    let (sim, mut client) = node();
    let (_, id) = run(&mut client, "web", "run").await;
    let failure = FaultKind::Fail(tonic::Code::Unknown, "simulated".to_owned());
    sim.faults(|f| f.add(CallFault::on(Method::ContainerStatus, failure)));
    let harness = awake(&sim, SensorSet::LISTS).await;
    for _ in 0..20 {
        harness.pleg.view(&uid("web")).await.expect_err("the runtime fails");
        sleep(ms(70)).await;
    }
    sim.faults(Faults::clear);
    harness.pleg.view(&uid("web")).await.expect("a snapshot");
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running));
}

#[tokio::test(start_paused = true)]
async fn idle_pods_cost_no_calls() {
    let (sim, client) = node();
    for pod in 0..200 {
        run(&mut client.clone(), &format!("p{pod}"), "run").await;
    }
    let harness = awake(&sim, SensorSet::ALL).await;
    assert!(harness.seen.until(secs(30), |_| harness.pleg.all().len() == 200).await);
    sleep(secs(10)).await;
    let before = sim.trace(Trace::total);
    sleep(secs(600)).await;
    let calls = sim.trace(Trace::total) - before;
    assert_eq!(calls, 4, "two relists in ten minutes, no calls per pod");
}

/// A process may be OOM-killed before any snapshot has its container. The kill is reported once its container is known.
#[tokio::test(start_paused = true)]
async fn oom_kill_before_the_first_inspection_is_attributed() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let (_, id) = run(&mut client, "web", "run").await;
    assert_eq!(cached(&harness, "web", &id), None, "not inspected yet");
    sim.oom_child("web", "main").expect("alive");
    assert!(
        harness.seen.until(secs(5), |seen| seen.oom_victims() == [OomVictim::Child]).await,
        "{:?}",
        harness.seen.oom_kills()
    );
}

/// As `crictl runp` makes one. Naive: a pod is listed by its label, which it lacks, so that its worker finds nothing to remove.
#[tokio::test(start_paused = true)]
async fn a_sandbox_without_labels_is_inspected_until_it_is_removed() {
    let (sim, mut client) = node();
    let config = v1::PodSandboxConfig { labels: Default::default(), ..sandbox("bare", 0) };
    let id = client.run_sandbox(config).await.expect("sandbox");
    let harness = awake(&sim, SensorSet::LISTS).await;
    assert!(harness.seen.until(secs(5), |_| harness.pleg.cached(&uid("bare")).is_some()).await);
    let inspect = async || harness.pleg.inspect(&uid("bare")).await.expect("view").sandboxes.clone();
    let found = inspect().await;
    assert!(found.len() == 1 && found[0].id.as_str() == id && found[0].ready, "{found:?}");
    client.stop_sandbox(&id).await.expect("stopped");
    let stopped = inspect().await;
    assert!(stopped.len() == 1 && !stopped[0].ready, "{stopped:?}");
    client.remove_sandbox(&id).await.expect("removed");
    let left = inspect().await;
    assert!(left.is_empty(), "{left:?}");
}

/// Naive: the pod has two sandboxes that are ready, so that its worker restarts it.
#[tokio::test(start_paused = true)]
async fn a_sandbox_without_labels_counts_for_nothing_beside_the_pods_own() {
    let (sim, mut client) = node();
    let (own, _) = run(&mut client, "web", "run").await;
    let config = v1::PodSandboxConfig { labels: Default::default(), ..sandbox("web", 1) };
    let other = client.run_sandbox(config).await.expect("sandbox");
    let harness = awake(&sim, SensorSet::LISTS).await;
    assert!(harness.seen.until(secs(5), |_| harness.pleg.cached(&uid("web")).is_some()).await);
    let listed = harness.pleg.cached(&uid("web")).expect("cached");
    let inspected = harness.pleg.inspect(&uid("web")).await.expect("view");
    for found in [listed, inspected] {
        assert!(found.sandboxes.len() == 1 && found.sandboxes[0].id.as_str() == own, "{found:?}");
    }
    client.stop_sandbox(&own).await.expect("stopped");
    client.remove_sandbox(&own).await.expect("removed");
    let is_found = |_: &Seen| {
        let cached = harness.pleg.cached(&uid("web"));
        cached.is_some_and(|found| found.sandboxes.iter().any(|sandbox| sandbox.id.as_str() == other))
    };
    assert!(harness.seen.until(secs(10), is_found).await, "it is removed once the pod is gone");
}
