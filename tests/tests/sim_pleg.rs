//! The failure modes of event-driven PLEGs, at the level of the PLEG: each test fails with the naive design that its
//! comment names. The test acts on the runtime itself, as a pod's worker would.

use std::time::Duration;

use keblet::events::sensors::Sensor;
use keblet::events::sensors::SensorState;
use keblet::metrics::Metrics;
use keblet::model::ContainerState;
use keblet::model::LifecycleKind;
use keblet::model::PodSnapshot;
use keblet::model::PodUid;
use keblet::model::Source;
use keblet_tests::cri::client::Client;
use keblet_tests::cri::client::container;
use keblet_tests::cri::client::sandbox;
use keblet_tests::cri::*;
use keblet_tests::node::PlegHarness;
use keblet_tests::node::SensorSet;
use tokio::time::Instant;
use tokio::time::sleep;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn node() -> (SimRuntime, Client) {
    node_with(Options::default())
}

fn node_with(options: Options) -> (SimRuntime, Client) {
    let sim = SimRuntime::new(options);
    sim.images(|images| images.store("busybox", 1 << 20));
    let client = Client::new(sim.memory().channel());
    (sim, client)
}

fn uid(pod: &str) -> PodUid {
    PodUid::from(format!("{pod}-uid"))
}

/// Starts sensors and PLEG and waits until the event stream is up and the first relist done.
async fn awake(sim: &SimRuntime, sensors: SensorSet) -> PlegHarness {
    let harness = PlegHarness::open(sim, sensors);
    let up = harness.seen.until(secs(5), |seen| seen.relists().iter().filter(|(_, _, ok)| *ok).count() >= 2).await;
    assert!(up || !sensors.events, "{:?}", harness.board.report());
    harness
}

/// State of a container in the pod cache.
fn cached(harness: &PlegHarness, pod: &str, id: &str) -> Option<ContainerState> {
    state(harness.pleg.cached(&uid(pod)).as_deref()?, id)
}

fn state(snapshot: &PodSnapshot, id: &str) -> Option<ContainerState> {
    snapshot.containers.iter().find(|c| c.id.as_str() == id).map(|c| c.state)
}

async fn run(client: &mut Client, pod: &str, program: &str) -> (String, String) {
    let sandbox_id = client.run_sandbox(sandbox(pod, 0)).await.expect("sandbox");
    let id = client.launch(&sandbox_id, container("main", 0, program)).await.expect("launch");
    (sandbox_id, id)
}

/// How long after its true death a container was first seen dead.
fn latency(sim: &SimRuntime, harness: &PlegHarness, id: &str) -> Duration {
    let (died, _) = sim.trace(|l| l.instance(id).and_then(|i| i.exited)).expect("dead");
    let (seen, _) = harness.seen.of(LifecycleKind::ContainerDied, id).first().expect("seen").clone();
    seen.saturating_duration_since(died)
}

/// F1. Naive: the CREATED event puts the state Created into the cache, where a worker that acts takes it for news and
/// starts another. Here a worker's view after its own action is sampled after that action, whatever events say.
#[tokio::test(start_paused = true)]
async fn f01_inspection_after_an_action_includes_it() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    // Created long before it is started, so that the event has every chance to be served in between.
    let id = client.create(&pod, container("main", 0, "run")).await.expect("create");
    harness.seen.until(secs(2), |_| cached(&harness, "web", &id).is_some()).await;
    sim.faults(|f| f.events = EventFaults { late: 1.0, late_by: ms(500), ..EventFaults::default() });
    client.start(&id).await.expect("start");
    let view = harness.pleg.inspect(&uid("web")).await.expect("view");
    assert_eq!(state(&view, &id), Some(ContainerState::Running));
    sleep(secs(3)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running), "late events brought nothing older back");
}

/// F2. Naive: a pod that was not looked at yet reads as a pod without containers.
#[tokio::test(start_paused = true)]
async fn f02_uninspected_pod_is_not_an_empty_pod() {
    let (sim, mut client) = node();
    let (_, id) = run(&mut client, "web", "run").await;
    sim.faults(|f| {
        f.add(CallFault::on(Method::ContainerStatus, FaultKind::Slow(secs(8))));
        f.add(CallFault::on(Method::ListContainers, FaultKind::Slow(secs(3))));
    });
    let harness = PlegHarness::open(&sim, SensorSet::ALL);
    let begin = Instant::now();
    let view = harness.pleg.view(&uid("web")).await.expect("view");
    assert_eq!(state(&view, &id), Some(ContainerState::Running));
    assert!(begin.elapsed() >= secs(8), "it waited for a real look: {:?}", begin.elapsed());
    let nobody = harness.pleg.view(&uid("nobody")).await.expect("view");
    assert!(nobody.containers.is_empty() && nobody.sandboxes.is_empty());
}

/// F3. Naive: the worker waits for an event stamped after its own action, or for a 5 s tick.
#[tokio::test(start_paused = true)]
async fn f03_inspection_does_not_wait_for_events() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let (_, id) = run(&mut client, "web", "run").await;
    sim.faults(|f| f.events.lost = 1.0);
    client.stop(&id, 5).await.expect("stop");
    let begin = Instant::now();
    let view = harness.pleg.inspect(&uid("web")).await.expect("view");
    assert_eq!(state(&view, &id), Some(ContainerState::Exited));
    assert!(begin.elapsed() < ms(20), "{:?}", begin.elapsed());
}

/// F4. Naive: a clock tick declares what is cached to be fresh. Here "fresh" is a read of the runtime, even while the
/// event stream lags behind for seconds.
#[tokio::test(start_paused = true)]
async fn f04_inspection_reads_the_runtime() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    let (_, id) = run(&mut client, "web", "run").await;
    assert!(harness.seen.until(secs(2), |_| cached(&harness, "web", &id) == Some(ContainerState::Running)).await);
    sim.faults(|f| f.events = EventFaults { late: 1.0, late_by: secs(60), ..EventFaults::default() });
    sim.kill("web", "main", Exit::Code(1)).expect("alive");
    sleep(secs(6)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running), "nothing has told it yet");
    let view = harness.pleg.inspect(&uid("web")).await.expect("view");
    assert_eq!(state(&view, &id), Some(ContainerState::Exited));
}

/// F5. Naive: payloads are state, ordered by their stamps; a RUNNING snapshot stamped after the exit wins for ever.
#[tokio::test(start_paused = true)]
async fn f05_stale_snapshot_does_not_revive_an_exited_container() {
    for sensors in [SensorSet::ALL, SensorSet::EVENTS] {
        let (sim, mut client) = node();
        let harness = awake(&sim, sensors).await;
        let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
        let id = client.create(&pod, container("main", 0, "exit 1 20ms")).await.expect("create");
        sim.faults(|f| f.events = EventFaults { stale: 1.0, stale_by: ms(400), ..EventFaults::default() });
        let starting = tokio::spawn({
            let (mut client, id) = (client.clone(), id.clone());
            async move { client.start(&id).await }
        });
        sim.until("exited", secs(2), |l| l.instance(&id).is_some_and(|i| i.exited.is_some())).await.expect("exit");
        starting.await.expect("no panic").expect("start");
        sim.faults(Faults::clear);
        assert!(harness.seen.until(secs(3), |seen| seen.deaths(&id) == 1).await, "{sensors:?}");
        sleep(secs(5)).await;
        assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Exited), "{sensors:?}");
        assert_eq!(harness.seen.deaths(&id), 1, "{sensors:?}");
    }
}

/// F6. Naive: stamps decide; one in a wrong unit lies in the far future (or past) and freezes the pod (or hides the
/// event).
#[tokio::test(start_paused = true)]
async fn f06_runtime_timestamps_do_not_order_snapshots() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    sim.faults(|f| f.events.misdated = 1.0);
    for pod in ["a", "b", "c", "d", "e", "f"] {
        let (_, id) = run(&mut client, pod, "exit 1 200ms").await;
        assert!(harness.seen.until(secs(2), |seen| seen.deaths(&id) == 1).await, "{pod}: {:?}", harness.seen.events());
        assert!(latency(&sim, &harness, &id) < ms(100), "{:?}", latency(&sim, &harness, &id));
    }
}

/// F7. Naive: a time stamp in PodSandboxStatus is taken for the promise of container statuses beside it.
#[tokio::test(start_paused = true)]
async fn f07_missing_container_statuses_are_not_missing_containers() {
    let features = Features { status_timestamp: true, status_containers: false, ..Features::containerd_1_7() };
    let (sim, mut client) = node_with(Options { features, ..Options::default() });
    let harness = awake(&sim, SensorSet::ALL).await;
    sim.faults(|f| f.events.bare = 1.0);
    let (pod, id) = run(&mut client, "web", "run").await;
    let second = client.launch(&pod, container("side", 0, "run")).await.expect("launch");
    let view = harness.pleg.inspect(&uid("web")).await.expect("view");
    assert_eq!(view.containers.len(), 2);
    sim.kill("web", "side", Exit::Code(1)).expect("alive");
    assert!(harness.seen.until(secs(1), |seen| seen.deaths(&second) == 1).await);
    sleep(secs(1)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running));
}

/// F8. Naive: what the stream did not bring did not happen. Here the kernel brings it, or else the next list does, and
/// a reconnect is followed by a list of its own.
#[tokio::test(start_paused = true)]
async fn f08_lost_events_are_recovered() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    sim.faults(|f| f.events.lost = 1.0);
    let (_, id) = run(&mut client, "web", "run").await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    sim.kill("web", "main", Exit::Code(4)).expect("alive");
    assert!(harness.seen.until(ms(10), |seen| seen.deaths(&id) == 1).await, "the kernel tells at once");
    sleep(secs(30)).await;
    assert_eq!(harness.seen.deaths(&id), 1, "and once");
    let confirmed = harness.pleg.cached(&uid("web")).expect("cached");
    assert_eq!(confirmed.containers[0].reason, "Error", "confirmed although no event came");
}

/// F8, without kernel sensors, and more events than the runtime's queue holds while nobody reads.
#[tokio::test(start_paused = true)]
async fn f08_overflowed_event_queue_is_recovered_by_a_relist() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    for attempt in 0..350 {
        let id = client.launch(&pod, container("churn", attempt, "exit 0 1ms")).await.expect("launch");
        sleep(ms(50)).await;
        client.remove(&id).await.expect("remove");
    }
    let id = client.launch(&pod, container("main", 0, "exit 3 1ms")).await.expect("launch");
    sleep(ms(100)).await;
    assert!(sim.events().0 > 0, "events were dropped");
    let harness = awake(&sim, SensorSet::EVENTS).await;
    assert!(harness.seen.until(secs(1), |seen| seen.deaths(&id) == 1).await);
    let running = client.launch(&pod, container("next", 0, "exit 1 1s")).await.expect("launch");
    assert!(
        harness.seen.until(secs(2), |seen| seen.deaths(&running) == 1).await,
        "the stream is not stuck in the past"
    );
}

/// F8, a reader whose connection died swallows one more event: the exit that follows a reconnect must not depend on it.
#[tokio::test(start_paused = true)]
async fn f08_agent_started_after_a_killed_one_misses_no_exit() {
    let (sim, mut client) = node();
    let (_, id) = run(&mut client, "web", "run").await;
    drop(awake(&sim, SensorSet::EVENTS).await);
    let harness = awake(&sim, SensorSet::ALL).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running));
    sim.kill("web", "main", Exit::Code(1)).expect("alive");
    assert!(harness.seen.until(ms(10), |seen| seen.deaths(&id) == 1).await, "its event goes to the dead reader");
    sleep(secs(20)).await;
    assert_eq!(harness.pleg.cached(&uid("web")).expect("cached").containers[0].reason, "Error");
}

/// F9. Naive: an event's one sandbox is written as the whole pod; late news of an old one hide the new one.
#[tokio::test(start_paused = true)]
async fn f09_events_of_an_old_sandbox_do_not_hide_the_new_one() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let (old, dead) = run(&mut client, "web", "run").await;
    sim.faults(|f| f.events = EventFaults { late: 1.0, late_by: secs(3), ..EventFaults::default() });
    client.stop_sandbox(&old).await.expect("stop");
    let new = client.run_sandbox(sandbox("web", 1)).await.expect("sandbox");
    let id = client.launch(&new, container("main", 1, "run")).await.expect("launch");
    let view = harness.pleg.inspect(&uid("web")).await.expect("view");
    assert_eq!((view.sandboxes.len(), view.containers.len()), (2, 2));
    assert!(view.sandboxes[0].ready && !view.sandboxes[1].ready, "newest first");
    client.remove_sandbox(&old).await.expect("remove");
    sleep(secs(10)).await;
    let view = harness.pleg.cached(&uid("web")).expect("still there");
    assert_eq!((view.sandboxes.len(), state(&view, &id)), (1, Some(ContainerState::Running)));
    assert_eq!((harness.seen.deaths(&dead), harness.seen.deaths(&id)), (1, 0));
}

/// F10. Naive: an event without a sandbox status is dropped, and the pod leaks or stays as it was.
#[tokio::test(start_paused = true)]
async fn f10_event_without_sandbox_status_triggers_a_relist() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    let (pod, id) = run(&mut client, "web", "run").await;
    assert!(harness.seen.until(secs(1), |_| cached(&harness, "web", &id) == Some(ContainerState::Running)).await);
    sim.faults(|f| f.events.anonymous = 1.0);
    sim.kill("web", "main", Exit::Code(1)).expect("alive");
    assert!(harness.seen.until(ms(200), |seen| seen.deaths(&id) == 1).await);
    client.remove_sandbox(&pod).await.expect("remove");
    let removed = |seen: &keblet_tests::node::Seen| !seen.of(LifecycleKind::ContainerRemoved, &pod).is_empty();
    assert!(harness.seen.until(secs(2), removed).await);
    assert!(harness.pleg.cached(&uid("web")).is_none(), "nothing leaks");
}

/// F11. Naive: lists are compared with lists and events write beside them, so that a wrong entry is confirmed by two
/// equal lists. Here every comparison is with what was last published.
#[tokio::test(start_paused = true)]
async fn f11_relists_are_compared_with_the_published_cache() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::LISTS).await;
    let (_, id) = run(&mut client, "web", "run").await;
    assert!(harness.seen.until(secs(3), |_| cached(&harness, "web", &id) == Some(ContainerState::Running)).await);
    // A worker's inspection publishes the death; the lists before and after it agree with each other or with it.
    sim.kill("web", "main", Exit::Code(1)).expect("alive");
    sleep(ms(60)).await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    sleep(secs(10)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Exited));
    assert_eq!(harness.seen.deaths(&id), 1, "told once, by whoever came first");
}

/// F12. Naive: five immediate retries burn out while the socket is away, and events are never used again.
#[tokio::test(start_paused = true)]
async fn f12_event_stream_reconnects_after_any_outage() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    let (_, lives) = run(&mut client, "lives", "run").await;
    let (_, dies) = run(&mut client, "dies", "run").await;
    sleep(secs(1)).await;
    sim.go_down();
    sleep(secs(1)).await;
    assert!(matches!(harness.board.get(Sensor::RuntimeEvents), Some(SensorState::Down(_))));
    sim.kill("dies", "main", Exit::Code(1)).expect("alive");
    sleep(secs(3600)).await;
    sim.come_up(Recovery::default());
    assert!(harness.seen.until(secs(30), |seen| seen.deaths(&dies) == 1).await, "the list after the reconnect");
    assert!(harness.seen.until(secs(30), |_| harness.board.get(Sensor::RuntimeEvents) == Some(SensorState::Up)).await);
    sleep(secs(5)).await;
    let before = sim.trace(Trace::total);
    sleep(secs(200)).await;
    assert_eq!(sim.trace(Trace::total), before, "event-driven again: nothing happens, nothing is asked");
    sim.kill("lives", "main", Exit::Code(1)).expect("alive");
    assert!(harness.seen.until(ms(100), |seen| seen.deaths(&lives) == 1).await);
}

#[tokio::test(start_paused = true)]
async fn unavailable_runtime_is_retried_with_back_off() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    // An event that carries the exit itself would leave nothing to ask.
    sim.faults(|f| f.events.bare = 1.0);
    let (_, id) = run(&mut client, "web", "exit 1 1s").await;
    sim.faults(|f| f.add(CallFault::on(Method::ListContainers, FaultKind::Slow(ms(500)))));
    sim.until("reported", secs(2), |l| l.instance(&id).is_some_and(|i| i.reported.is_some())).await.expect("exit");
    sleep(ms(100)).await;
    sim.go_down();
    let before = harness.seen.inspections();
    sleep(secs(600)).await;
    let tries = harness.seen.inspections() - before;
    assert!((1..100).contains(&tries), "the unserved hint is tried again, but with delays: {tries}");
    sim.come_up(Recovery::default());
    assert!(harness.seen.until(secs(30), |seen| seen.deaths(&id) == 1).await);
}

/// F13. Naive: a full channel makes the PLEG unhealthy, the unhealthy node stops its only reader, for ever.
#[tokio::test(start_paused = true)]
async fn f13_unread_event_flood_does_not_block_the_pleg() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    sim.faults(|f| f.events.doubled = 1.0);
    let mut pods = Vec::new();
    for pod in 0..10 {
        pods.push(client.run_sandbox(sandbox(&format!("p{pod}"), 0)).await.expect("sandbox"));
    }
    for attempt in 0..40 {
        for pod in &pods {
            client.launch(pod, container("churn", attempt, "exit 0 1ms")).await.expect("launch");
        }
    }
    let last = client.launch(&pods[0], container("main", 0, "exit 1 100ms")).await.expect("launch");
    assert!(harness.seen.until(secs(5), |seen| seen.deaths(&last) == 1).await);
    assert_eq!(harness.pleg.changed_pods().await.len(), 10, "thousands of events are ten pods with news");
    let died: Vec<usize> = sim.trace(|l| l.instances().iter().map(|i| harness.seen.deaths(&i.id)).collect());
    assert_eq!(died, [1; 401]);
}

/// F14. Naive: gauges count events up and down while lists reset them. Here they are set from the pod cache.
#[tokio::test(start_paused = true)]
async fn f14_running_gauges_are_set_from_the_cache() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let metrics = Metrics::new();
    sim.faults(|f| f.events = EventFaults { doubled: 0.7, lost: 0.3, swapped: 0.3, ..EventFaults::default() });
    for pod in ["a", "b", "c", "d"] {
        let exits = client.run_sandbox(sandbox(pod, 0)).await.expect("sandbox");
        for attempt in 0..3 {
            client.launch(&exits, container("main", attempt, "exit 1 100ms")).await.expect("launch");
            sleep(ms(300)).await;
        }
        run(&mut client, &format!("{pod}-stays"), "run").await;
        let (stopped, _) = run(&mut client, &format!("{pod}-stopped"), "run").await;
        client.stop_sandbox(&stopped).await.expect("stop");
        for name in [pod.to_owned(), format!("{pod}-stays"), format!("{pod}-stopped")] {
            harness.pleg.inspect(&uid(&name)).await.expect("view");
        }
    }
    // Lost events are recovered by kernel records and inspections, and by the next relist at the latest.
    sleep(secs(400)).await;
    metrics.pods.observe_cache(&harness.pleg.all());
    let text = metrics.render().expect("metrics");
    for line in [
        "kubelet_running_pods 8",
        "kubelet_running_containers{container_state=\"running\"} 4",
        "kubelet_running_containers{container_state=\"exited\"} 16",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}\n{}", sim.trace(Trace::to_string));
    }
    assert_eq!(sim.trace(Trace::live_count), 4);
}

/// F15. Naive: each event is a transition. Runtimes repeat, reorder and omit them.
#[tokio::test(start_paused = true)]
async fn f15_repeated_and_reordered_events_report_one_exit() {
    for seed in 0..8 {
        let (sim, mut client) = node_with(Options { seed, ..Options::default() });
        let harness = awake(&sim, if seed % 2 == 0 { SensorSet::ALL } else { SensorSet::EVENTS }).await;
        sim.faults(|f| {
            f.events =
                EventFaults { doubled: 0.6, swapped: 0.6, late: 0.6, late_by: ms(900), ..EventFaults::default() };
        });
        let (_, id) = run(&mut client, "web", "exit 1 300ms").await;
        assert!(harness.seen.until(secs(3), |seen| seen.deaths(&id) == 1).await, "seed {seed}");
        sleep(secs(5)).await;
        assert_eq!(harness.seen.deaths(&id), 1, "seed {seed}");
        assert!(harness.seen.of(LifecycleKind::ContainerStarted, &id).len() <= 1, "seed {seed}");
    }
}

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
    assert!(harness.seen.until(secs(3), |seen| seen.deaths(&id) == 1).await);
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
    assert!(harness.seen.until(secs(2), |seen| seen.deaths(&id) == 1).await);
    let lag = latency(&sim, &harness, &id);
    assert!((ms(45)..ms(60)).contains(&lag), "not before the runtime reported the exit: {lag:?}");
    assert!(sim.trace(|l| l.live("host", "main").is_none()), "nothing of it lived when it was told dead");
}

/// A container that shares the PID namespace of its pod or of the host proves nothing by the end of its init. But that end
/// is a reason to inspect the pod: a lost event is noticed after a second, not with the next relist.
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
        assert!(harness.seen.until(secs(8), |seen| seen.deaths(&id) == 1).await, "{mode:?}");
        let lag = latency(&sim, &harness, &id);
        assert!((ms(45)..ms(1100)).contains(&lag), "a hint, confirmed by an inspection: {lag:?}");
        let settled = harness.seen.inspections();
        sleep(secs(120)).await;
        assert_eq!(harness.seen.inspections(), settled, "nothing is left to look for");
    }
}

/// A runtime that goes on saying "running" after the end of such an init is inspected a bounded number of times.
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
    // Dies before anybody has looked, and its number goes to another container while the runtime still names it.
    let first = client.launch(&pod, container("first", 0, "exit 0 1ms")).await.expect("launch");
    let pid = sim.trace(|l| l.instance(&first).and_then(|i| i.pid)).expect("started");
    sim.kernel().wait_gone(pid).await;
    sim.kernel().reuse(pid);
    let second = client.launch(&pod, container("second", 0, "run")).await.expect("launch");
    assert_eq!(sim.trace(|l| l.instance(&second).and_then(|i| i.pid)), Some(pid));
    harness.pleg.inspect(&uid("web")).await.expect("view");
    sleep(secs(5)).await;
    assert_eq!(cached(&harness, "web", &second), Some(ContainerState::Running));
    assert_eq!((harness.seen.deaths(&first), harness.seen.deaths(&second)), (1, 0));
    sim.kill("web", "second", Exit::Code(1)).expect("alive");
    assert!(harness.seen.until(ms(10), |seen| seen.deaths(&second) == 1).await, "its own death is still proven");
}

#[tokio::test(start_paused = true)]
async fn runtime_wins_a_lasting_contradiction() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    sim.set_exit_report(secs(60));
    let (_, id) = run(&mut client, "web", "exit 1 1s").await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    assert!(harness.seen.until(secs(2), |seen| seen.deaths(&id) == 1).await);
    sleep(secs(40)).await;
    assert_eq!(harness.seen.contradictions(), 1, "counted");
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running));
    sleep(secs(40)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Exited));
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
    assert_eq!(harness.seen.deaths(&other), 1);
    sim.faults(Faults::clear);
    assert!(harness.seen.until(secs(30), |_| cached(&harness, "stuck", &stuck) == Some(ContainerState::Running)).await);
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
    assert_eq!(calls, 4, "two periodic lists in ten minutes, nothing per pod");
}

/// A process may die of memory before any snapshot shows its container. The kill is told once its owner is known.
#[tokio::test(start_paused = true)]
async fn oom_kill_before_the_first_inspection_is_attributed() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let (_, id) = run(&mut client, "web", "run").await;
    assert_eq!(cached(&harness, "web", &id), None, "not seen yet");
    sim.oom_child("web", "main").expect("alive");
    assert!(
        harness.seen.until(secs(5), |seen| seen.oom_kills() == [Some(false)]).await,
        "{:?}",
        harness.seen.oom_kills()
    );
}
