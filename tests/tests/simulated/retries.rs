//! A runtime that refuses a call for ever: the agent retries with growing pauses, logs each reason once, and sends an
//! event for what stays stuck.

mod calls;

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use keblet::images::GcPolicy;
use keblet::model::DeadContainerPolicy;
use keblet::model::PodUid;
use keblet::recorder::Recorder;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::until;
use tokio::time::Instant;
use tokio::time::sleep;
use tonic::Code;
use tracing::field::Field;
use tracing::field::Visit;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::layer::SubscriberExt as _;

const fn minutes(minutes: u64) -> Duration {
    Duration::from_secs(60 * minutes)
}

/// Logged warnings and errors.
#[derive(Clone, Default)]
pub(crate) struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock().expect("not poisoned"))
    }
}

impl<S: tracing::Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() <= tracing::Level::WARN {
            let mut line = Line(event.metadata().target().to_owned());
            event.record(&mut line);
            self.0.lock().expect("not poisoned").push(line.0);
        }
    }
}

/// What an agent does, minute by minute.
pub(crate) struct ByMinute {
    calls: Vec<u64>,
    /// Warnings and errors, without events.
    lines: Vec<Vec<String>>,
    /// Warnings that are events.
    events: Vec<String>,
}

impl ByMinute {
    /// Counts calls of `method` and warnings for so many minutes from now on.
    pub(crate) async fn observe(sim: &SimRuntime, method: Method, warnings: &Warnings, count: usize) -> Self {
        let mut observed = Self { calls: Vec::new(), lines: Vec::new(), events: Vec::new() };
        for _ in 0..count {
            let before = sim.trace(|trace| trace.count(method));
            sleep(minutes(1)).await;
            observed.calls.push(sim.trace(|trace| trace.count(method)) - before);
            let (events, lines): (Vec<String>, Vec<String>) =
                warnings.take().into_iter().partition(|line| line.starts_with("keblet::recorder"));
            observed.lines.push(lines);
            observed.events.extend(events);
        }
        observed
    }

    /// The calls in these minutes.
    pub(crate) fn calls(&self, minutes: Range<usize>) -> u64 {
        self.calls[minutes].iter().sum()
    }

    /// The lines of all minutes that name the refusal.
    pub(crate) fn refusals(&self) -> Vec<&String> {
        self.lines.iter().flatten().filter(|line| line.contains(REFUSAL)).collect()
    }

    /// Checks that every minute has few lines, and that something stuck was reported if that is expected.
    ///
    /// # Panics
    /// Otherwise.
    pub(crate) fn assert_reported(&self, as_stuck: bool) {
        assert!(self.lines.iter().all(|lines| lines.len() <= 6), "{:#?}", self.lines);
        let stuck = self.events.iter().filter(|event| event.contains("OperationStuck")).count();
        assert_eq!(stuck, usize::from(as_stuck), "{:#?}", self.events);
    }
}

/// The message of a runtime that refuses a call.
pub(crate) const REFUSAL: &str = "refused for ever";

/// Refuses a call from now on.
pub(crate) fn refuse(sim: &SimRuntime, method: Method) {
    let refused = FaultKind::Fail(Code::Unknown, REFUSAL.to_owned());
    sim.faults(|faults| faults.add(CallFault::on(method, refused)));
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, " {field}={value:?}");
    }
}

/// The agent's actions in ten minutes that begin ten minutes after the runtime began to refuse the call.
struct Observed {
    calls: u64,
    first: Vec<String>,
    warnings: Vec<String>,
    /// Of the pod, at the end.
    containers: usize,
    sandboxes: usize,
}

/// When the runtime begins to refuse.
#[derive(Clone, Copy, PartialEq)]
enum From {
    /// Before the pod is created.
    Start,
    /// While the pod runs.
    Running,
    /// While the pod runs, which is then deleted.
    Deletion,
    /// While the pod's container crashes again and again.
    Crashes,
}

async fn reject(method: Method, from: From) -> Observed {
    let warnings = Warnings::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
    let (sim, folder) = node();
    let refused = || CallFault::on(method, FaultKind::Fail(Code::Unknown, "refused for ever".to_owned()));
    if from == From::Start {
        sim.faults(|faults| faults.add(refused()));
    }
    let program = if from == From::Crashes { "exit 1 5s" } else { "run" };
    let web = pod("web").running("main", program).build();
    let recorder = Recorder::logging("sim");
    let agent = Agent::start_with_recorder(&sim, SensorSet::ALL, folder.path(), vec![web.clone()], recorder);
    sleep(minutes(1)).await;
    if from != From::Start {
        sim.faults(|faults| faults.add(refused()));
    }
    if from == From::Deletion {
        agent.remove(web).await;
    }
    sleep(minutes(10)).await;
    let first = warnings.take();
    let before = sim.trace(|trace| trace.count(method));
    sleep(minutes(10)).await;
    let calls = sim.trace(|trace| trace.count(method)) - before;
    let containers =
        sim.trace(|trace| trace.history("web", "main").filter(|instance| instance.removed.is_none()).count());
    Observed { calls, first, warnings: warnings.take(), containers, sandboxes: sim.sandboxes("web").len() }
}

async fn retries(method: Method, from: From, calls_in_ten_minutes: u64) -> Observed {
    let observed = reject(method, from).await;
    let Observed { calls, first, warnings, .. } = &observed;
    assert!(*calls <= calls_in_ten_minutes, "{method:?}: {calls} calls in ten minutes");
    assert!(first.len() <= 60, "{method:?}: {} warnings in the first ten minutes: {first:#?}", first.len());
    assert!(warnings.len() <= 40, "{method:?}: {} warnings in ten minutes: {warnings:#?}", warnings.len());
    observed
}

fn has_stuck_event(observed: &Observed) -> bool {
    observed.first.iter().chain(&observed.warnings).any(|line| line.contains("OperationStuck"))
}

#[tokio::test(start_paused = true)]
async fn calls_that_start_a_pod_are_retried_with_growing_pauses() {
    for method in [Method::RunPodSandbox, Method::ImageStatus, Method::CreateContainer, Method::StartContainer] {
        let observed = retries(method, From::Start, 40).await;
        assert!(observed.calls >= 5, "{method:?}: it is not retried");
        assert!(has_stuck_event(&observed), "{method:?}: {:#?}", observed.first);
    }
}

#[tokio::test(start_paused = true)]
async fn calls_that_end_a_pod_are_retried_with_growing_pauses() {
    for method in [Method::StopContainer, Method::StopPodSandbox, Method::RemovePodSandbox] {
        let observed = retries(method, From::Deletion, 40).await;
        assert!(observed.calls >= 1, "{method:?}: it is not retried");
        assert!(has_stuck_event(&observed), "{method:?}: {:#?}", observed.first);
    }
}

#[tokio::test(start_paused = true)]
async fn a_container_that_cannot_be_removed_is_removed_with_its_sandbox() {
    // RemovePodSandbox also removes the sandbox's containers, so that nothing remains to be retried.
    let observed = retries(Method::RemoveContainer, From::Deletion, 0).await;
    assert_eq!((observed.containers, observed.sandboxes), (0, 0));
    assert!(observed.first.iter().any(|line| line.contains("refused for ever")), "{:#?}", observed.first);
}

/// A runtime that lists a sandbox, and answers `NotFound` when it is to be stopped.
#[tokio::test(start_paused = true)]
async fn what_is_still_listed_after_its_removal_is_removed_again_with_growing_pauses() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "run").build();
    let recorder = Recorder::logging("sim");
    let agent = Agent::start_with_recorder(&sim, SensorSet::ALL, folder.path(), vec![web.clone()], recorder);
    sleep(minutes(1)).await;
    let unknown = FaultKind::Fail(Code::NotFound, "no such sandbox".to_owned());
    sim.faults(|faults| faults.add(CallFault::on(Method::StopPodSandbox, unknown)));
    agent.remove(web).await;
    sleep(minutes(10)).await;
    let calls = || sim.trace(|trace| trace.count(Method::StopPodSandbox));
    let before = calls();
    sleep(minutes(10)).await;
    let more = calls() - before;
    assert!((1..=40).contains(&more), "{more} calls in ten minutes");
    sim.faults(Faults::clear);
    sleep(minutes(10)).await;
    assert!(sim.sandboxes("web").is_empty(), "{}", sim.trace(Trace::to_string));
}

#[tokio::test(start_paused = true)]
async fn garbage_collection_is_retried_with_growing_pauses() {
    // Every crash adds a container: one pass over all of them, three crashes and their passes in ten minutes.
    let observed = retries(Method::RemoveContainer, From::Crashes, 60).await;
    assert!(observed.calls >= 1, "it is not retried");
}

#[tokio::test(start_paused = true)]
async fn garbage_of_a_pod_that_was_removed_is_not_stuck() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "exit 1 1s").build();
    let (agent, metrics) = Agent::start_with_metrics(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
    refuse(&sim, Method::RemoveContainer);
    let shows = |count: u32| {
        let line = format!("keblet_stuck_operations{{operation=\"collect_garbage\"}} {count}\n");
        metrics.render().expect("metrics").contains(&line)
    };
    sleep(minutes(15)).await;
    assert!(shows(1), "{}", metrics.render().expect("metrics"));
    sim.faults(Faults::clear);
    agent.remove(web).await;
    sleep(minutes(2)).await;
    assert!(sim.sandboxes("web").is_empty(), "{}", sim.trace(Trace::to_string));
    assert!(shows(0), "{}", metrics.render().expect("metrics"));
}

/// When the removal of the container of this pod was requested.
fn removals(sim: &SimRuntime, pod: &str) -> Vec<Instant> {
    let name = format!("main_{pod}_");
    let of_pod = |call: &&Call| call.method == Method::RemoveContainer && call.object.starts_with(&name);
    sim.trace(|trace| trace.calls().filter(of_pod).map(|call| call.at).collect())
}

/// What exceeds the limit on all pods is removed by one task; the pods have ended.
#[tokio::test(start_paused = true)]
async fn a_container_beyond_the_limit_of_the_node_that_cannot_be_removed_delays_no_other() {
    let warnings = Warnings::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
    let (sim, folder) = node();
    let refuse = |why: &str| {
        let fault = CallFault::on(Method::RemoveContainer, FaultKind::Fail(Code::Unknown, why.to_owned()));
        sim.faults(|faults| faults.add(fault.about("main_stuck_")));
    };
    refuse("it is busy");
    let (api, names) = (Api::default(), ["a", "b", "c", "stuck"]);
    let ends = |name: &str| pod(name).restarted("Never").running("main", "exit 0 5s").from_api().build();
    let pods = names.map(|name| api.put(&ends(name)));
    let policy = DeadContainerPolicy { total: Some(0), ..DeadContainerPolicy::default() };
    let agent = Agent::start_limiting_dead_containers(&sim, folder.path(), pods.into(), policy, &api);
    sleep(Duration::from_secs(30)).await;
    for name in names {
        agent.update(api.pod(name).expect("the pod")).await;
    }
    let left = || names.map(|name| sim.trace(|trace| trace.history(name, "main").any(|i| i.removed.is_none())));
    sleep(Duration::from_secs(40)).await;
    assert_eq!(left(), [false, false, false, true], "{}", sim.trace(Trace::to_string));

    sleep(minutes(40)).await;
    let attempts = removals(&sim, "stuck");
    let pauses: Vec<u64> = attempts.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
    assert!((6..=12).contains(&pauses.len()), "{pauses:?}");
    // The task looks once a minute; pauses are a half longer at random.
    assert!(pauses[0] <= 122 && pauses[1] >= 120 && pauses[2] >= 240, "{pauses:?}");
    assert!(pauses[3..].iter().all(|pause| (300..=512).contains(pause)), "{pauses:?}");
    refuse("its mounts are busy");
    sleep(minutes(20)).await;
    let (events, logged): (Vec<String>, Vec<String>) =
        warnings.take().into_iter().filter(|line| line.contains("busy")).partition(|line| line.contains("recorder"));
    assert_eq!(logged.len(), 2, "one line for each reason: {logged:#?}");
    assert!(logged[0].contains("it is busy") && logged[1].contains("its mounts are busy"), "{logged:#?}");
    // As a kubelet, one for each pass that failed.
    let failed = events.iter().filter(|line| line.contains("ContainerGCFailed")).count();
    assert_eq!(failed, removals(&sim, "stuck").len(), "{events:#?}");

    sim.faults(Faults::clear);
    sleep(minutes(9)).await;
    assert_eq!(left(), [false; 4], "{}", sim.trace(Trace::to_string));
}

/// There are passes every five minutes, each of which tries all of them.
#[tokio::test(start_paused = true)]
async fn images_that_cannot_be_removed_are_logged_once() {
    let warnings = Warnings::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
    let (sim, folder) = node();
    sim.images(|images| images.store("unused:1", 1 << 20));
    let refused = FaultKind::Fail(Code::Unknown, "refused for ever".to_owned());
    sim.faults(|faults| faults.add(CallFault::on(Method::RemoveImage, refused)));
    let policy = GcPolicy { max_age: minutes(10), ..GcPolicy::default() };
    let _agent = Agent::start_collecting_images(&sim, SensorSet::ALL, folder.path(), Vec::new(), policy);
    sleep(minutes(120)).await;
    let calls = sim.trace(|trace| trace.count(Method::RemoveImage));
    assert!(calls >= 20, "{calls}");
    let mut logged = warnings.take();
    // As a kubelet, an event for each pass that failed.
    logged.retain(|line| line.contains("refused for ever") && !line.contains("recorder"));
    // One for each of two images, and one for the passes.
    assert!((2..=3).contains(&logged.len()), "{logged:#?}");
}

#[tokio::test(start_paused = true)]
async fn calls_that_observe_are_retried_once_a_second_at_most() {
    use Method::ContainerStatus;
    use Method::GetContainerEvents;
    use Method::ListContainers;
    use Method::ListPodSandbox;
    use Method::PodSandboxStatus;
    use Method::Status;
    for method in [ContainerStatus, PodSandboxStatus, ListContainers, ListPodSandbox, GetContainerEvents, Status] {
        retries(method, From::Running, 700).await;
    }
}

/// A start that the network delays is not attempted: it does not count for the back-off of crash loops. It is tried again just
/// as often while back-off holds another container of the pod.
#[tokio::test(start_paused = true)]
async fn a_container_that_exits_while_the_network_is_not_ready_is_restarted_once_it_is() {
    let (sim, folder) = node();
    // From about 619 s on `side` is held for 300 s.
    let web = pod("web").own_network().running("main", "exit 1 700s until 1").running("side", "exit 1 1s").build();
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web]);
    until(&sim, "main runs", |t| t.live("web", "main").is_some()).await;
    sleep(Duration::from_secs(630)).await;
    // The agent reads it once a minute.
    sim.set_condition("NetworkReady", false, "NetworkPluginNotReady", "cni plugin not initialized");
    until(&sim, "main exited", |t| t.live("web", "main").is_none()).await;
    sleep(Duration::from_secs(100)).await;
    let status = agent.statuses.get(&PodUid::from("web-uid")).expect("a status");
    let main = &status.container_statuses.expect("containers")[0];
    assert_eq!(main.state.as_ref().and_then(|state| state.waiting.as_ref()), None, "it crashed once");

    sim.set_condition("NetworkReady", true, "", "");
    let ready_at = Instant::now();
    until(&sim, "main runs again", |t| t.live("web", "main").is_some()).await;
    assert!(ready_at.elapsed() < Duration::from_secs(20), "{:?}\n{}", ready_at.elapsed(), sim.trace(Trace::to_string));
}

/// The end of a back-off is counted from the runtime's time of the exit, which is ahead of a clock that was set back.
#[tokio::test(start_paused = true)]
async fn a_clock_that_was_set_back_holds_no_container_longer_than_its_back_off() {
    let (sim, folder) = node();
    let web = pod("web").running("main", "exit 1 1s until 3").build();
    let (_agent, began) = (Agent::start_behind(&sim, folder.path(), vec![web], minutes(5)), Instant::now());
    until(&sim, "main runs again", |t| t.live("web", "main").is_some_and(|main| main.attempt == 3)).await;
    // Four instances, the first restart at once, the others after 10 and 20 s.
    let took = began.elapsed();
    assert!((30..40).contains(&took.as_secs()), "{took:?}\n{}", sim.trace(Trace::to_string));
}
