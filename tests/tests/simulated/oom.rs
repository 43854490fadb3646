//! OOM verdicts of the whole agent: reasons in statuses, events, metrics.

use std::sync::Arc;
use std::time::Duration;

use keblet::metrics::Metrics;
use keblet::model::OomConfidence;
use keblet::model::OomScope;
use keblet::model::OomVictim;
use keblet::model::PodUid;
use keblet::recorder::Recorder;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::PodOf;
use keblet_tests::node::RecordedEvents;
use keblet_tests::node::Seen;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::recorder;
use tempfile::TempDir;
use tokio::time::Instant;
use tokio::time::sleep;

/// Deadline of every wait, on the simulated node's clock.
const SOON: Duration = Duration::from_secs(60);

/// An agent with one pod `web`.
struct Node {
    sim: SimRuntime,
    agent: Agent,
    metrics: Arc<Metrics>,
    events: RecordedEvents,
    seen: Seen,
    _folder: TempDir,
}

impl Node {
    async fn running(pod: PodOf, sensors: SensorSet) -> Self {
        let node = Self::begin(pod, sensors);
        node.until("it is reported as running", |node| node.state("running").is_some()).await;
        node
    }

    fn begin(pod: PodOf, sensors: SensorSet) -> Self {
        Self::recording(pod, sensors, recorder())
    }

    fn recording(pod: PodOf, sensors: SensorSet, (recorder, events): (Recorder, RecordedEvents)) -> Self {
        let (sim, folder) = node();
        let seen = Seen::default();
        let pods = vec![pod.build()];
        let (agent, metrics) = Agent::start_reporting(&sim, sensors, folder.path(), pods, recorder, seen.clone());
        Self { sim, agent, metrics, events, seen, _folder: folder }
    }

    async fn until(&self, what: &str, met: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + SOON;
        while !met(self) {
            assert!(Instant::now() < deadline, "not met: {what}\n{}", self.status());
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn status(&self) -> serde_json::Value {
        let status = self.agent.statuses.get(&PodUid::from("web-uid"));
        serde_json::to_value(status).expect("a status")
    }

    /// The state of container `main`, if it is `kind`.
    fn state(&self, kind: &str) -> Option<serde_json::Value> {
        let state = self.status()["containerStatuses"][0]["state"][kind].clone();
        (!state.is_null()).then_some(state)
    }

    /// The reason of the last exit of container `main`.
    fn last_reason(&self) -> Option<String> {
        let last = self.status()["containerStatuses"][0]["lastState"]["terminated"]["reason"].clone();
        let now = self.state("terminated").map(|state| state["reason"].clone());
        now.unwrap_or(last).as_str().map(str::to_owned)
    }

    async fn ends_with(&self, reason: &str) {
        self.until(reason, |node| node.last_reason().as_deref() == Some(reason)).await;
        // The runtime has confirmed it, and nothing changes any more.
        sleep(Duration::from_secs(30)).await;
        assert_eq!(self.last_reason().as_deref(), Some(reason), "{}", self.status());
    }

    /// Messages of the events with this reason, and their field paths.
    fn oom_events(&self) -> Vec<(String, String)> {
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let events = self.events.lock().expect("not poisoned");
        let of_reason = events.iter().filter(|(_, event)| event["reason"] == "OOMKilled");
        of_reason.map(|(_, event)| (text(&event["involvedObject"]["fieldPath"]), text(&event["message"]))).collect()
    }

    fn shows(&self, line: &str) {
        let text = self.metrics.render().expect("metrics");
        assert!(text.lines().any(|found| found == line), "{line} not in\n{text}");
    }
}

fn never() -> PodOf {
    pod("web").restarted("Never")
}

#[tokio::test(start_paused = true)]
async fn a_killed_main_process_is_oom_killed_everywhere() {
    let node = Node::running(never().running("main", "oom 5s"), SensorSet::ALL).await;
    node.ends_with("OOMKilled").await;
    let [verdict] = &node.seen.oom_kills()[..] else { panic!("{:?}", node.seen.oom_kills()) };
    assert_eq!((verdict.victim, verdict.scope), (OomVictim::Main, OomScope::Container));
    assert_eq!((verdict.confidence, verdict.missing.len()), (OomConfidence::Kernel, 0));
    assert_eq!(verdict.container.as_ref().map(|container| container.name.as_str()), Some("main"));
    let [(path, message)] = &node.oom_events()[..] else { panic!("{:?}", node.oom_events()) };
    assert_eq!(path, "spec.containers{main}");
    let end = ", the main process of container main, was killed: the container reached its memory limit of 64Mi; it held \
               60Mi anonymous, 0 file and 0 shared memory";
    assert!(message.starts_with("Process simulated (pid ") && message.ends_with(end), "{message}");
    node.shows("keblet_oom_kills_total{confidence=\"kernel\",scope=\"container\",victim=\"main\"} 1");
    node.shows(
        "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"137\",reason=\"OOMKilled\"} 1",
    );
    let text = node.metrics.render().unwrap();
    let mut corrected = text.lines().filter(|line| line.starts_with("keblet_oom_reasons_corrected_total{"));
    assert!(corrected.all(|line| line.ends_with(" 0")), "the runtime was right: {text}");
}

/// The kernel reports the kill before the runtime reports the exit: the first status has the reason already.
#[tokio::test(start_paused = true)]
async fn the_reason_is_known_before_the_runtime_reports_the_exit() {
    let node = Node::running(never().running("main", "run"), SensorSet::ALL).await;
    node.sim.set_exit_report(Duration::from_secs(10));
    node.sim.kill("web", "main", Exit::Oom).expect("it runs");
    let began = Instant::now();
    node.until("terminated", |node| node.state("terminated").is_some()).await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(node.last_reason().as_deref(), Some("OOMKilled"));
    node.ends_with("OOMKilled").await;
}

/// containerd reports `OOMKilled` for every exit of a container in which any process was killed.
#[tokio::test(start_paused = true)]
async fn a_child_kill_does_not_label_a_later_ordinary_exit() {
    for (exit, reason) in [(Exit::Code(0), "Completed"), (Exit::Code(3), "Error"), (Exit::Signal(9), "Error")] {
        let node = Node::running(never().running("main", "run"), SensorSet::ALL).await;
        node.sim.oom_child("web", "main").expect("it runs");
        node.until("a verdict", |node| node.seen.oom_victims() == [OomVictim::Child]).await;
        assert_eq!(node.oom_events().len(), 1, "a child's kill is an event too");
        sleep(Duration::from_secs(5)).await;
        assert!(node.state("running").is_some());
        node.sim.set_exit_report(Duration::from_secs(10));
        node.sim.kill("web", "main", exit).expect("it runs");
        node.until("terminated", |node| node.state("terminated").is_some()).await;
        assert_eq!(node.last_reason().as_deref(), Some(reason), "before the runtime reports the exit");
        node.ends_with(reason).await;
        node.shows("keblet_oom_kills_total{confidence=\"kernel\",scope=\"container\",victim=\"child\"} 1");
        node.shows(&format!("keblet_oom_reasons_corrected_total{{from=\"OOMKilled\",to=\"{reason}\"}} 1"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_kill_that_the_runtime_missed_is_corrected() {
    let node = Node::begin(never().running("main", "oom 5s"), SensorSet::ALL);
    node.sim.miss_oom_events();
    node.ends_with("OOMKilled").await;
    node.shows("keblet_oom_reasons_corrected_total{from=\"Error\",to=\"OOMKilled\"} 1");
}

/// Without the probe the exit code alone proves that a process was not killed; what it does not prove is the runtime's
/// word.
#[tokio::test(start_paused = true)]
async fn without_evidence_only_impossible_reasons_are_corrected() {
    for sensors in [SensorSet::EVENTS, SensorSet::LISTS] {
        for (exit, reason) in [(Exit::Code(0), "Completed"), (Exit::Signal(9), "OOMKilled"), (Exit::Oom, "OOMKilled")] {
            let node = Node::running(never().running("main", "run"), sensors).await;
            node.sim.oom_child("web", "main").expect("it runs");
            node.sim.kill("web", "main", exit).expect("it runs");
            node.ends_with(reason).await;
            assert_eq!(node.seen.oom_victims(), [], "no sensor reports kills");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_exec_is_neither_main_process_nor_child() {
    let node = Node::running(pod("web").running("main", "run"), SensorSet::ALL).await;
    node.sim.oom_exec("web", "main").expect("it runs");
    node.until("a verdict", |node| node.seen.oom_victims() == [OomVictim::Exec]).await;
    node.until("an event", |node| !node.oom_events().is_empty()).await;
    let (path, message) = &node.oom_events()[0];
    assert!(message.contains(", started by an exec in container main,"), "{message}");
    assert_eq!(path, "spec.containers{main}");
    assert!(node.state("running").is_some());
}

#[tokio::test(start_paused = true)]
async fn the_main_process_of_a_pod_in_the_hosts_pid_namespace() {
    let node = Node::running(never().host_pid().running("main", "run"), SensorSet::ALL).await;
    node.sim.kill("web", "main", Exit::Oom).expect("it runs");
    node.ends_with("OOMKilled").await;
    assert_eq!(node.seen.oom_victims(), [OomVictim::Main]);
}

/// A thousand kills: each is counted, and the state of the pod is right.
#[tokio::test(start_paused = true)]
async fn a_burst_of_kills_loses_no_state() {
    // Events of a burst are dropped by the spam filter, as upstream's are.
    let logging = (Recorder::logging("sim"), RecordedEvents::default());
    let node = Node::recording(never().running("main", "run"), SensorSet::ALL, logging);
    node.until("it is reported as running", |node| node.state("running").is_some()).await;
    for _ in 0..1000 {
        node.sim.oom_child("web", "main").expect("it runs");
    }
    node.sim.kill("web", "main", Exit::Oom).expect("it runs");
    node.ends_with("OOMKilled").await;
    node.shows("keblet_oom_kills_total{confidence=\"kernel\",scope=\"container\",victim=\"child\"} 1000");
    node.shows("keblet_oom_kills_total{confidence=\"kernel\",scope=\"container\",victim=\"main\"} 1");
}
