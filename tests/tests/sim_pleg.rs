//! The failure modes of event-driven PLEGs, at the level of the PLEG: each test fails with the naive design in its
//! comment. The test acts on the runtime itself, as a pod worker would.

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

/// Time from a container's exit to its first report.
fn latency(sim: &SimRuntime, harness: &PlegHarness, id: &str) -> Duration {
    let (exited_at, _) = sim.trace(|l| l.instance(id).and_then(|i| i.exited)).expect("exited");
    let (reported_at, _) = harness.seen.of(LifecycleKind::ContainerDied, id).first().expect("reported").clone();
    reported_at.saturating_duration_since(exited_at)
}

/// F1. Naive: the CREATED event puts the state Created into the cache, where a worker takes it for a new state and
/// starts another container. Here a worker's view after its own action is sampled after that action, whatever events
/// report.
#[tokio::test(start_paused = true)]
async fn f01_inspection_after_an_action_includes_it() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    // Created long before it is started, so that the event can be delivered in between.
    let id = client.create(&pod, container("main", 0, "run")).await.expect("create");
    harness.seen.until(secs(2), |_| cached(&harness, "web", &id).is_some()).await;
    sim.faults(|f| f.events = EventFaults { late: 1.0, late_by: ms(500), ..EventFaults::default() });
    client.start(&id).await.expect("start");
    let view = harness.pleg.inspect(&uid("web")).await.expect("view");
    assert_eq!(state(&view, &id), Some(ContainerState::Running));
    sleep(secs(3)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running), "late events restored no older state");
}

/// F2. Naive: a pod that was not inspected yet reads as a pod without containers.
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
    assert!(begin.elapsed() >= secs(8), "it did not wait for an inspection: {:?}", begin.elapsed());
    let unknown = harness.pleg.view(&uid("unknown")).await.expect("view");
    assert!(unknown.containers.is_empty() && unknown.sandboxes.is_empty());
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

/// F4. Naive: a clock tick declares the cached state fresh. Here "fresh" is a read of the runtime, even while the event
/// stream is seconds late.
#[tokio::test(start_paused = true)]
async fn f04_inspection_reads_the_runtime() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    let (_, id) = run(&mut client, "web", "run").await;
    assert!(harness.seen.until(secs(2), |_| cached(&harness, "web", &id) == Some(ContainerState::Running)).await);
    sim.faults(|f| f.events = EventFaults { late: 1.0, late_by: secs(60), ..EventFaults::default() });
    sim.kill("web", "main", Exit::Code(1)).expect("alive");
    sleep(secs(6)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running), "it is not reported yet");
    let view = harness.pleg.inspect(&uid("web")).await.expect("view");
    assert_eq!(state(&view, &id), Some(ContainerState::Exited));
}

/// F5. Naive: payloads are state, ordered by their timestamps; a RUNNING snapshot stamped after the exit wins for ever.
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
        assert!(harness.seen.until(secs(3), |seen| seen.exit_count(&id) == 1).await, "{sensors:?}");
        sleep(secs(5)).await;
        assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Exited), "{sensors:?}");
        assert_eq!(harness.seen.exit_count(&id), 1, "{sensors:?}");
    }
}

/// F6. Naive: timestamps decide; one in a wrong unit is in the far future (or past) and freezes the pod (or hides the
/// event).
#[tokio::test(start_paused = true)]
async fn f06_runtime_timestamps_do_not_order_snapshots() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    sim.faults(|f| f.events.misdated = 1.0);
    for pod in ["a", "b", "c", "d", "e", "f"] {
        let (_, id) = run(&mut client, pod, "exit 1 200ms").await;
        assert!(
            harness.seen.until(secs(2), |seen| seen.exit_count(&id) == 1).await,
            "{pod}: {:?}",
            harness.seen.events()
        );
        assert!(latency(&sim, &harness, &id) < ms(100), "{:?}", latency(&sim, &harness, &id));
    }
}

/// F7. Naive: with a timestamp in PodSandboxStatus its list of container statuses is taken for complete.
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
    assert!(harness.seen.until(secs(1), |seen| seen.exit_count(&second) == 1).await);
    sleep(secs(1)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running));
}

/// F8. Naive: what the stream did not deliver did not happen. Here the kernel reports it, or else the next relist, and
/// a reconnect is followed by a relist.
#[tokio::test(start_paused = true)]
async fn f08_lost_events_are_recovered() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    sim.faults(|f| f.events.lost = 1.0);
    let (_, id) = run(&mut client, "web", "run").await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    sim.kill("web", "main", Exit::Code(4)).expect("alive");
    assert!(harness.seen.until(ms(10), |seen| seen.exit_count(&id) == 1).await, "the kernel reports it at once");
    sleep(secs(30)).await;
    assert_eq!(harness.seen.exit_count(&id), 1, "reported once");
    let confirmed = harness.pleg.cached(&uid("web")).expect("cached");
    assert_eq!(confirmed.containers[0].reason, "Error", "confirmed although no event came");
}

/// F8, without kernel sensors, and with more events than the runtime's queue holds while the stream is not read.
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
    assert!(harness.seen.until(secs(1), |seen| seen.exit_count(&id) == 1).await);
    let running = client.launch(&pod, container("next", 0, "exit 1 1s")).await.expect("launch");
    assert!(harness.seen.until(secs(2), |seen| seen.exit_count(&running) == 1).await, "new events are delivered");
}

/// F8. A disconnected reader consumes one more event: the exit that follows a reconnect must not depend on it.
#[tokio::test(start_paused = true)]
async fn f08_agent_started_after_a_killed_one_misses_no_exit() {
    let (sim, mut client) = node();
    let (_, id) = run(&mut client, "web", "run").await;
    drop(awake(&sim, SensorSet::EVENTS).await);
    let harness = awake(&sim, SensorSet::ALL).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Running));
    sim.kill("web", "main", Exit::Code(1)).expect("alive");
    assert!(
        harness.seen.until(ms(10), |seen| seen.exit_count(&id) == 1).await,
        "its event is consumed by the disconnected reader"
    );
    sleep(secs(20)).await;
    assert_eq!(harness.pleg.cached(&uid("web")).expect("cached").containers[0].reason, "Error");
}

/// F9. Naive: an event's single sandbox is written as the whole pod; late events of an old one hide the new one.
#[tokio::test(start_paused = true)]
async fn f09_events_of_an_old_sandbox_do_not_hide_the_new_one() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::ALL).await;
    let (old, old_container) = run(&mut client, "web", "run").await;
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
    assert_eq!((harness.seen.exit_count(&old_container), harness.seen.exit_count(&id)), (1, 0));
}

/// F10. Naive: an event without a sandbox status is dropped, and the pod is never removed or updated.
#[tokio::test(start_paused = true)]
async fn f10_event_without_sandbox_status_triggers_a_relist() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    let (pod, id) = run(&mut client, "web", "run").await;
    assert!(harness.seen.until(secs(1), |_| cached(&harness, "web", &id) == Some(ContainerState::Running)).await);
    sim.faults(|f| f.events.anonymous = 1.0);
    sim.kill("web", "main", Exit::Code(1)).expect("alive");
    assert!(harness.seen.until(ms(200), |seen| seen.exit_count(&id) == 1).await);
    client.remove_sandbox(&pod).await.expect("remove");
    let removed = |seen: &keblet_tests::node::Seen| !seen.of(LifecycleKind::ContainerRemoved, &pod).is_empty();
    assert!(harness.seen.until(secs(2), removed).await);
    assert!(harness.pleg.cached(&uid("web")).is_none(), "the pod is removed from the cache");
}

/// F11. Naive: lists are compared with lists while events write as well, so that a wrong entry is confirmed by two
/// equal lists. Here every comparison is with what was last published.
#[tokio::test(start_paused = true)]
async fn f11_relists_are_compared_with_the_published_cache() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::LISTS).await;
    let (_, id) = run(&mut client, "web", "run").await;
    assert!(harness.seen.until(secs(3), |_| cached(&harness, "web", &id) == Some(ContainerState::Running)).await);
    // A worker's inspection publishes the exit; the lists before and after it agree with each other or with it.
    sim.kill("web", "main", Exit::Code(1)).expect("alive");
    sleep(ms(60)).await;
    harness.pleg.inspect(&uid("web")).await.expect("view");
    sleep(secs(10)).await;
    assert_eq!(cached(&harness, "web", &id), Some(ContainerState::Exited));
    assert_eq!(harness.seen.exit_count(&id), 1, "reported once, by whichever came first");
}

/// F12. Naive: five immediate retries are used up while the socket is missing, and events are never used again.
#[tokio::test(start_paused = true)]
async fn f12_event_stream_reconnects_after_any_outage() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    let (_, survivor) = run(&mut client, "survivor", "run").await;
    let (_, victim) = run(&mut client, "victim", "run").await;
    sleep(secs(1)).await;
    sim.go_down();
    sleep(secs(1)).await;
    assert!(matches!(harness.board.get(Sensor::RuntimeEvents), Some(SensorState::Down(_))));
    sim.kill("victim", "main", Exit::Code(1)).expect("alive");
    sleep(secs(3600)).await;
    sim.come_up(Recovery::default());
    assert!(harness.seen.until(secs(30), |seen| seen.exit_count(&victim) == 1).await, "the list after the reconnect");
    assert!(harness.seen.until(secs(30), |_| harness.board.get(Sensor::RuntimeEvents) == Some(SensorState::Up)).await);
    sleep(secs(5)).await;
    let before = sim.trace(Trace::total);
    sleep(secs(200)).await;
    assert_eq!(sim.trace(Trace::total), before, "event-driven again: no calls without events");
    sim.kill("survivor", "main", Exit::Code(1)).expect("alive");
    assert!(harness.seen.until(ms(100), |seen| seen.exit_count(&survivor) == 1).await);
}

#[tokio::test(start_paused = true)]
async fn unavailable_runtime_is_retried_with_back_off() {
    let (sim, mut client) = node();
    let harness = awake(&sim, SensorSet::EVENTS).await;
    // An event that contains the exit would make the inspection superfluous.
    sim.faults(|f| f.events.bare = 1.0);
    let (_, id) = run(&mut client, "web", "exit 1 1s").await;
    sim.faults(|f| f.add(CallFault::on(Method::ListContainers, FaultKind::Slow(ms(500)))));
    sim.until("reported", secs(2), |l| l.instance(&id).is_some_and(|i| i.reported.is_some())).await.expect("exit");
    sleep(ms(100)).await;
    sim.go_down();
    let before = harness.seen.inspections();
    sleep(secs(600)).await;
    let tries = harness.seen.inspections() - before;
    assert!((1..100).contains(&tries), "the failed inspection is retried with pauses: {tries}");
    sim.come_up(Recovery::default());
    assert!(harness.seen.until(secs(30), |seen| seen.exit_count(&id) == 1).await);
}

/// F13. Naive: a full channel makes the PLEG unhealthy, and the unhealthy node stops its only reader for ever.
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
    assert!(harness.seen.until(secs(5), |seen| seen.exit_count(&last) == 1).await);
    assert_eq!(harness.pleg.changed_pods().await.len(), 10, "thousands of events mark ten pods as changed");
    let exits: Vec<usize> = sim.trace(|l| l.instances().iter().map(|i| harness.seen.exit_count(&i.id)).collect());
    assert_eq!(exits, [1; 401]);
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
        assert!(harness.seen.until(secs(3), |seen| seen.exit_count(&id) == 1).await, "seed {seed}");
        sleep(secs(5)).await;
        assert_eq!(harness.seen.exit_count(&id), 1, "seed {seed}");
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
        harness.seen.until(secs(5), |seen| seen.oom_kills() == [Some(false)]).await,
        "{:?}",
        harness.seen.oom_kills()
    );
}
