//! When a node is measured, on a clock that does not run by itself.

use std::path::Path;

use super::*;
use crate::cgroups::Hierarchies;
use crate::cgroups::Hierarchy;
use crate::cgroups::HierarchyKind;
use crate::cgroups::Layout;
use crate::kernel::index::place_of;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::KernelMoment;
use crate::model::OomConfidence;
use crate::model::OomRecord;
use crate::model::OomTime;
use crate::observe::collect::sample::CountedKills;
use crate::observe::metrics::ends_measurement;
use crate::observe::record::Confidence;
use crate::observe::record::PodName;
use crate::observe::record::PressureScope;
use crate::oom::verdict::decide;
use crate::pleg::DirtyPods;
use crate::pleg::testing::changing_handle;
use crate::pleg::testing::container;
use crate::pleg::testing::idle_handle;
use crate::pleg::testing::publish;
use crate::pleg::testing::snapshot;

const INTERVAL: Duration = Duration::from_secs(2);

/// The task of a node whose cgroups are in `tree`.
fn task(
    pleg: PlegHandle,
    interval: Duration,
    sensor_states: SensorStates,
    tree: &Path,
    out: mpsc::Sender<Message>,
) -> Task {
    let layout = Layout::V2 { mount: tree.to_owned() };
    let sampler = Sampler::new(Hierarchies { layout, containers: None, limits_swap: false }, "/".to_owned(), None);
    let options = CollectOptions {
        endpoint: "unix:///nonexistent/runtime.sock".parse().unwrap(),
        cgroup_root: "/".to_owned(),
        interval,
        node: "node".to_owned(),
        version: "0",
    };
    Task::new(Parts { options, v2: true, log_is_followed: false, pleg, sensor_states, sampler, out })
}

/// A node without pods.
struct Node {
    messages: mpsc::Receiver<Message>,
    measures: mpsc::Sender<oneshot::Sender<()>>,
    _verdicts: broadcast::Sender<Arc<OomVerdict>>,
    _tree: tempfile::TempDir,
}

impl Node {
    /// `relist`: whether the runtime has listed its pods.
    fn new(interval: Duration, relist: SensorState) -> Self {
        Self::with(idle_handle(), interval, relist)
    }

    fn with(pleg: PlegHandle, interval: Duration, relist: SensorState) -> Self {
        let tree = tempfile::tempdir().unwrap();
        let sensor_states = SensorStates::default();
        sensor_states.set(Sensor::Relist, relist);
        let (out, messages) = mpsc::channel(64);
        let (measures, asked) = mpsc::channel(1);
        let verdicts = broadcast::Sender::new(1);
        let inputs = Inputs { verdicts: verdicts.subscribe(), measures: asked, versions: oneshot::channel().1 };
        tokio::spawn(task(pleg, interval, sensor_states, tree.path(), out).run(inputs));
        Self { messages, measures, _verdicts: verdicts, _tree: tree }
    }

    async fn next(&mut self) -> Message {
        self.messages.recv().await.expect("the task runs")
    }

    /// The time of the next measurement.
    async fn measured(&mut self) -> Instant {
        while !matches!(self.next().await, Message::Line(line) if ends_measurement(&line)) {}
        Instant::now()
    }

    /// Asks for a measurement; returns how many there were until the answer, and whether the node became ready.
    async fn ask(&mut self) -> (usize, bool) {
        self.measures.send(oneshot::channel().0).await.expect("the task runs");
        let (mut count, mut ready) = (0, false);
        loop {
            match self.next().await {
                Message::Line(line) => {
                    count += usize::from(ends_measurement(&line));
                    ready |= matches!(line.record, Record::Ready(_));
                }
                Message::Measured(_) => return (count, ready),
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn each_request_returns_a_recent_measurement() {
    let mut node = Node::new(Duration::from_secs(3600), SensorState::Up);
    assert_eq!(node.ask().await, (1, true), "the first one is that of the beginning");
    for _ in 0..100 {
        assert_eq!(node.ask().await, (0, false));
    }
    tokio::time::sleep(FRESH).await;
    assert_eq!(node.ask().await, (1, false));
}

#[tokio::test(start_paused = true)]
async fn the_first_rates_are_over_a_whole_interval() {
    // The task waits for the list longer than an interval.
    let mut node = Node::new(INTERVAL, SensorState::Down("no answer".to_owned()));
    let began = Instant::now();
    let first = node.measured().await;
    assert!(first - began >= READ_TIMEOUT);
    assert!(node.measured().await - first >= INTERVAL);
}

#[tokio::test(start_paused = true)]
async fn no_measurement_follows_another_one_at_once() {
    let mut node = Node::new(INTERVAL, SensorState::Up);
    node.measured().await;
    tokio::time::sleep(INTERVAL - LEAST_WINDOW / 2).await;
    assert_eq!(node.ask().await, (1, true));
    let asked = Instant::now();
    assert!(node.measured().await - asked >= LEAST_WINDOW);
}

#[tokio::test(start_paused = true)]
async fn kills_before_the_start_in_a_pod_that_is_inspected_late_are_reported_as_earlier() {
    let changed = DirtyPods::default();
    let handle = changing_handle(changed.clone());
    let mut node = Node::with(handle.clone(), INTERVAL, SensorState::Down("no answer".to_owned()));
    node.measured().await;
    let killed = ContainerStatus {
        finished_at: 3,
        exit_code: Some(137),
        reason: "OOMKilled".to_owned(),
        ..container("a", "web", ContainerState::Exited)
    };
    publish(&handle, snapshot(Instant::now(), vec![killed]));
    changed.mark(PodUid::from("p"));
    let reported = async {
        loop {
            if let Message::Line(line) = node.next().await
                && let Record::Oom(kill) = line.record
            {
                return kill;
            }
        }
    };
    let kill = tokio::time::timeout(3 * INTERVAL, reported).await.expect("it is reported");
    assert_eq!((kill.container_id.as_deref(), kill.earlier, kill.confidence), (Some("a"), true, Confidence::Runtime));
}

#[tokio::test(start_paused = true)]
async fn kills_are_reported_once_while_the_log_that_is_followed_cannot_be_read() {
    for (log_is_followed, expected) in [(false, 1), (true, 0)] {
        let (tree, sensor_states) = (tempfile::tempdir().unwrap(), SensorStates::default());
        sensor_states.set(Sensor::KernelLog, SensorState::Down("too many open files".to_owned()));
        let (out, mut messages) = mpsc::channel(64);
        let mut task = task(idle_handle(), INTERVAL, sensor_states, tree.path(), out);
        task.log_is_followed = log_is_followed;
        for kills in [0, 1] {
            let counted = CountedKills { of_pod: Some(kills), ..CountedKills::default() };
            let measurement = Measurement { oom_kills: vec![counted], ..Measurement::default() };
            assert!(task.report(measurement).await.is_ok());
        }
        let sent = std::iter::from_fn(|| messages.try_recv().ok());
        let is_kill =
            |message: &Message| matches!(message, Message::Line(line) if matches!(line.record, Record::Oom(_)));
        assert_eq!(sent.filter(is_kill).count(), expected, "{log_is_followed}");
    }
}

/// Neither counters of pods, which cgroup v2 has, nor the probe or the kernel log report it.
#[tokio::test(start_paused = true)]
async fn a_kill_is_reported_from_the_runtime_where_nothing_else_does() {
    for (v2, probe, log_is_followed, expected) in
        [(false, false, false, 1), (true, false, false, 0), (false, true, false, 0), (false, false, true, 0)]
    {
        let (tree, sensor_states) = (tempfile::tempdir().unwrap(), SensorStates::default());
        if probe {
            sensor_states.set(Sensor::Oom, SensorState::Up);
        }
        let (handle, (out, mut messages)) = (idle_handle(), mpsc::channel(64));
        let mut task = task(handle.clone(), INTERVAL, sensor_states, tree.path(), out);
        (task.v2, task.log_is_followed) = (v2, log_is_followed);
        let killed = ContainerStatus {
            finished_at: task.began + 1,
            exit_code: Some(137),
            reason: "OOMKilled".to_owned(),
            ..container("a", "web", ContainerState::Exited)
        };
        publish(&handle, snapshot(Instant::now(), vec![killed]));
        assert!(task.pods_changed(vec![PodUid::from("p")]).await.is_ok());
        let mut kills = Vec::new();
        while let Ok(message) = messages.try_recv() {
            if let Message::Line(line) = message
                && let Record::Oom(kill) = line.record
            {
                kills.push((kill.container, kill.confidence, kill.earlier));
            }
        }
        let kill = (Some("web".to_owned()), Confidence::Runtime, false);
        assert_eq!(kills, vec![kill; expected], "v2 {v2}, probe {probe}, log {log_is_followed}");
    }
}

#[tokio::test(start_paused = true)]
async fn pressure_of_pods_and_losses_are_reported_when_they_change() {
    let (tree, (out, mut messages)) = (tempfile::tempdir().unwrap(), mpsc::channel(64));
    let mut task = task(idle_handle(), INTERVAL, SensorStates::default(), tree.path(), out);
    let mut sent = || {
        let mut sent = Vec::new();
        while let Ok(Message::Line(line)) = messages.try_recv() {
            sent.push(match line.record {
                Record::Pressure(pressure) => format!("memory {:?}", pressure.memory_bytes),
                Record::Lost(lost) => format!("lost {}", lost.exits),
                other => panic!("{other:?}"),
            });
        }
        sent.join(", ")
    };
    let pod = PodName { namespace: "ns".into(), name: "web".into(), uid: "u".into() };
    for (bytes, exits, expected) in
        [(1, 3, "lost 3, memory Some(1)"), (1, 3, ""), (2, 5, "lost 2, memory Some(2)"), (1, 5, "memory Some(1)")]
    {
        let empty = PressureRecord::empty(PressureScope::Pod, Some(pod.clone()));
        let measurement = Measurement {
            pods: vec![PressureRecord { memory_bytes: Some(bytes), ..empty }],
            oom_kills: vec![CountedKills { pod: pod.clone(), ..CountedKills::default() }],
            losses: Losses { exits, ..Losses::default() },
            ..Measurement::default()
        };
        assert!(task.report(measurement).await.is_ok());
        assert_eq!(sent(), expected);
    }
    assert!(task.decided(Err(RecvError::Lagged(4))).await.is_ok());
    assert_eq!(sent(), "lost 4", "verdicts");
}

/// It is counted before its verdict is taken.
#[tokio::test(start_paused = true)]
async fn a_kill_during_the_first_measurement_is_reported_once() {
    assert_eq!(kills_with_verdict(false).await, [(Some("p".to_owned()), Confidence::Kernel, false)]);
}

/// A verdict may wait for the inspection of its pod.
#[tokio::test(start_paused = true)]
async fn a_kill_whose_verdict_comes_after_the_first_measurement_is_reported_once() {
    assert_eq!(kills_with_verdict(true).await, [(Some("p".to_owned()), Confidence::Counter, true)]);
}

/// What is reported of a kill before the first measurement that has a verdict before, or after (`is_late`), its end.
async fn kills_with_verdict(is_late: bool) -> Vec<(Option<String>, Confidence, bool)> {
    let tree = tempfile::tempdir().unwrap();
    let cgroup = tree.path().join("kubepods/podp");
    std::fs::create_dir_all(&cgroup).unwrap();
    std::fs::write(cgroup.join("memory.events"), "oom_kill 1\n").unwrap();
    let (out, mut messages) = mpsc::channel(64);
    let mut task = task(idle_handle(), INTERVAL, SensorStates::default(), tree.path(), out);
    let (mount, layout) = (tree.path().to_owned(), Layout::V2 { mount: tree.path().to_owned() });
    let containers = Some(Hierarchy { kind: HierarchyKind::Unified, number: 0, mount, root: "/".to_owned() });
    let hierarchies = Hierarchies { layout, containers, limits_swap: false };
    task.sampler = Some(Sampler::new(hierarchies, "/".to_owned(), None));
    task.pods.entry(PodUid::from("p")).or_default().update(&snapshot(Instant::now(), vec![]), 0);
    task.dead.entry("p".to_owned()).or_default();
    let decided = broadcast::Sender::new(1);
    let mut verdicts = decided.subscribe();
    let record = OomRecord { place: Some(place_of("/kubepods/podp")), ..evidence() };
    let verdict = Arc::new(decide(&record, None, false, OomTime(1)));
    tokio::time::advance(Duration::from_millis(1)).await;
    if !is_late {
        decided.send(verdict.clone()).unwrap();
    }
    assert!(task.measure(&mut verdicts).await.is_ok());
    if is_late {
        decided.send(verdict).unwrap();
        assert!(task.take_decided(&mut verdicts).await.is_ok());
    }
    let mut kills = Vec::new();
    while let Ok(message) = messages.try_recv() {
        if let Message::Line(line) = message
            && let Record::Oom(kill) = line.record
        {
            kills.push((kill.pod.map(|pod| pod.uid), kill.confidence, kill.earlier));
        }
    }
    kills
}

/// A kill that the probe has reported.
fn evidence() -> OomRecord {
    OomRecord { pid: Some(7), ..OomRecord::new(OomConfidence::Kernel, KernelMoment(Instant::now())) }
}

#[tokio::test(start_paused = true)]
async fn pods_that_change_all_the_time_do_not_delay_the_first_measurement_for_ever() {
    let changed = DirtyPods::default();
    let mut node = Node::with(changing_handle(changed.clone()), INTERVAL, SensorState::Up);
    tokio::spawn(async move {
        loop {
            changed.mark(PodUid::from("busy"));
            tokio::time::sleep(QUIET / 3).await;
        }
    });
    let began = Instant::now();
    let measured = tokio::time::timeout(3 * READ_TIMEOUT, node.measured()).await.expect("the node becomes ready");
    assert!(measured - began >= READ_TIMEOUT && measured - began < READ_TIMEOUT + QUIET);
}
