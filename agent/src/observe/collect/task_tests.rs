//! When a node is measured, on a clock that does not run by itself.

use super::*;
use crate::cgroups::Hierarchies;
use crate::cgroups::Layout;
use crate::observe::metrics::ends_measurement;
use crate::pleg::testing::idle_handle;

const INTERVAL: Duration = Duration::from_secs(2);

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
        let tree = tempfile::tempdir().unwrap();
        let layout = Layout::V2 { mount: tree.path().to_owned() };
        let sampler = Sampler::new(Hierarchies { layout, containers: None, limits_swap: false }, "/".to_owned(), None);
        let options = CollectOptions {
            endpoint: "unix:///nonexistent/runtime.sock".parse().unwrap(),
            cgroup_root: "/".to_owned(),
            interval,
            node: "node".to_owned(),
            version: "0",
        };
        let sensor_states = SensorStates::default();
        sensor_states.set(Sensor::Relist, relist);
        let (out, messages) = mpsc::channel(64);
        let (measures, asked) = mpsc::channel(1);
        let verdicts = broadcast::Sender::new(1);
        let inputs = Inputs { verdicts: verdicts.subscribe(), measures: asked, versions: oneshot::channel().1 };
        tokio::spawn(Task::new(options, true, idle_handle(), sensor_states, sampler, out).run(inputs));
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
