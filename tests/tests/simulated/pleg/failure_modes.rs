//! The failure modes of event-driven PLEGs: each test fails with the naive design in its comment.

use keblet::events::RelistReason;
use keblet::events::sensors::Sensor;
use keblet::events::sensors::SensorState;
use keblet::metrics::Metrics;
use keblet::model::ContainerState;
use keblet::model::LifecycleKind;
use keblet_tests::cri::client::container;
use keblet_tests::cri::client::sandbox;
use keblet_tests::cri::*;
use keblet_tests::node::PlegHarness;
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
use super::state;
use super::uid;
use crate::runtime::node;
use crate::runtime::node_with;

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

/// The process ends while an agent starts, and a disconnected reader consumes its event. The agent has not seen any pid
/// of the runtime yet, so that a missing process proves nothing.
#[tokio::test(start_paused = true)]
async fn f08_exit_during_the_start_of_an_agent_is_noticed_within_seconds() {
    let (sim, mut client) = node();
    let (_, id) = run(&mut client, "web", "run").await;
    sim.set_exit_report(ms(200));
    sim.faults(|f| f.events = EventFaults { lost: 1.0, ..EventFaults::default() });
    sim.kill("web", "main", Exit::Code(1)).expect("alive");
    sleep(ms(20)).await;
    let harness = PlegHarness::open(&sim, SensorSet::ALL);
    assert!(harness.seen.until(secs(3), |_| cached(&harness, "web", &id) == Some(ContainerState::Exited)).await);
    let settled = harness.seen.inspections();
    sleep(secs(120)).await;
    assert_eq!(harness.seen.inspections(), settled, "no inspection is pending");
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
    assert!(matches!(harness.sensor_states.get(Sensor::RuntimeEvents), Some(SensorState::Down(_))));
    sim.kill("victim", "main", Exit::Code(1)).expect("alive");
    sleep(secs(3600)).await;
    sim.come_up(Recovery::default());
    assert!(harness.seen.until(secs(30), |seen| seen.exit_count(&victim) == 1).await, "the list after the reconnect");
    assert!(
        harness
            .seen
            .until(secs(30), |_| harness.sensor_states.get(Sensor::RuntimeEvents) == Some(SensorState::Up))
            .await
    );
    sleep(secs(5)).await;
    let before = sim.trace(Trace::total);
    sleep(secs(200)).await;
    assert_eq!(sim.trace(Trace::total), before, "event-driven again: no calls without events");
    sim.kill("survivor", "main", Exit::Code(1)).expect("alive");
    assert!(harness.seen.until(ms(100), |seen| seen.exit_count(&survivor) == 1).await);
}

/// F12, with CRI-O without `enable_pod_events`. Naive: each stream counts as up until it ends, and costs a relist.
#[tokio::test(start_paused = true)]
async fn f12_event_stream_that_ends_at_once_is_not_up() {
    let features = Features { events: Delivery::EndsAtOnce, ..Features::all() };
    let (sim, mut client) = node_with(Options { features, ..Options::default() });
    let harness = PlegHarness::open(&sim, SensorSet::EVENTS);
    let is_up = |_: &Seen| harness.sensor_states.get(Sensor::RuntimeEvents) == Some(SensorState::Up);
    assert!(!harness.seen.until(secs(600), is_up).await);
    let attempts = sim.trace(|l| l.count(Method::GetContainerEvents));
    assert!((5..=11).contains(&attempts), "about one a minute: {attempts}");
    let reasons: Vec<_> = harness.seen.relists().into_iter().map(|(_, reason, _)| reason).collect();
    assert!(!reasons.contains(&RelistReason::Reconnect), "{reasons:?}");
    let (_, id) = run(&mut client, "web", "exit 1 100ms").await;
    assert!(harness.seen.until(secs(5), |seen| seen.exit_count(&id) == 1).await, "relists are frequent instead");
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
