//! Probes the containers of all pods. One task schedules, with one timer; each probe in progress is one more task.
//!
//! ```text
//!  pod workers ─ observe, terminating, remove ─▶ table ─ due ─▶ run ─▶ outcome ─▶ table ─▶ results ─▶ workers, statuses
//! ```

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::PodStatus;
use tokio::sync::Notify;
use tokio::task;
use tokio::task::JoinError;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::ProbeResultStore;
use super::run::Expand;
use super::run::Outcome;
use super::run::Runner;
use super::run::Subject;
use super::state::RunResult;
use super::table::Ended;
use super::table::Job;
use super::table::Moment;
use super::table::ProbeId;
use super::table::Table;
use super::target::Target;
use super::target::label;
use crate::http_get::Caller;
use crate::metrics::Metrics;
use crate::metrics::ProbeOf;
use crate::model::Clock;
use crate::model::ContainerId;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::sleep_until;
use crate::model::spec;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::runtime::Runtime;

/// Probes that are due within this time of each other are started at once, the earlier ones later. The timer fires no
/// more often, however many probes there are.
const TICK: Duration = Duration::from_millis(20);

/// What a prober reads of pods. Calls must not block.
pub trait ProbedPods: Send + Sync + 'static {
    /// The pod's primary address, if it is known.
    fn address(&self, pod: &PodUid) -> Option<String>;
    /// True unless this container is known not to run.
    fn may_run(&self, pod: &PodUid, container: &ContainerId) -> bool;
    /// The pod's last status, also that of an earlier agent.
    fn last_status(&self, pod: &Pod) -> Option<PodStatus>;
}

/// What a prober works with.
pub struct Parts {
    /// Runs exec probes.
    pub runtime: Runtime,
    /// Where results are published.
    pub results: ProbeResultStore,
    /// Addresses and states of pods.
    pub pods: Arc<dyn ProbedPods>,
    /// The Kubernetes version that probes name to servers, such as `v1.36.3`.
    pub version: &'static str,
    /// Expands commands.
    pub expand: Expand,
    /// Time.
    pub clock: Clock,
    /// Events of failures.
    pub recorder: Recorder,
    /// Counts.
    pub metrics: Arc<Metrics>,
}

/// Probes containers. Clones share everything; no call blocks.
#[derive(Clone)]
pub struct Prober(Arc<Shared>);

struct Shared {
    table: Mutex<Table>,
    /// A probe is due sooner than any before.
    changed: Notify,
    runner: Runner,
    pods: Arc<dyn ProbedPods>,
    clock: Clock,
    agent_started: SystemTime,
    recorder: Recorder,
    metrics: Arc<Metrics>,
}

/// A run that has ended.
struct Done {
    job: Job,
    /// `None`: the container has exited meanwhile.
    outcome: Option<Outcome>,
    took: Duration,
}

impl Prober {
    /// A prober that starts now. Nothing is probed until [`Self::run`].
    pub fn new(parts: Parts) -> Self {
        let caller = Caller::probe(parts.version);
        Self(Arc::new(Shared {
            table: Mutex::new(Table::new(parts.results)),
            changed: Notify::new(),
            runner: Runner { runtime: parts.runtime, caller, expand: parts.expand },
            pods: parts.pods,
            clock: parts.clock,
            agent_started: parts.clock.wall(),
            recorder: parts.recorder,
            metrics: parts.metrics,
        }))
    }

    /// Takes a pod's probes as of this snapshot. To be called before the status of the snapshot is published: new
    /// containers have a result for each of their probes from then on.
    pub fn observe(&self, pod: &Pod, snapshot: &PodSnapshot) {
        let moment = Moment { now: Instant::now(), wall: self.0.clock.wall(), agent: Some(self.0.agent_started) };
        let last_status = || self.0.pods.last_status(pod);
        let (ended, is_sooner) = {
            let mut table = self.0.table();
            let before = table.next_due();
            let ended = table.observe(pod, snapshot, &last_status, moment);
            (ended, table.next_due().is_some_and(|due| before.is_none_or(|before| due < before)))
        };
        self.0.end(&ended);
        if is_sooner {
            self.0.changed.notify_one();
        }
    }

    /// The pod's containers are being stopped: their end is no failure of liveness. Readiness and sidecars are probed on,
    /// also those of a pod that the agent found terminating when it started.
    pub fn terminating(&self, pod: &Pod, snapshot: &PodSnapshot) {
        let uid = pod_ref(pod).uid;
        let is_known = self.0.table().contains(&uid);
        if !is_known {
            self.observe(pod, snapshot);
        }
        let ended = self.0.table().terminating(&uid);
        self.0.end(&ended);
    }

    /// No container of the pod runs any more.
    pub fn remove(&self, pod: &PodUid) {
        let ended = self.0.table().remove(pod);
        self.0.end(&ended);
    }

    /// Probes until `shutdown`. Probes in progress are then abandoned.
    pub async fn run(self, shutdown: CancellationToken) {
        let shared = self.0;
        let epoch = Instant::now();
        let (mut runs, mut probes) = (JoinSet::new(), HashMap::new());
        loop {
            let due = shared.start_due(&mut runs, &mut probes).map(|due| next_tick(epoch, due));
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = shared.changed.notified() => {}
                Some(ended) = runs.join_next_with_id() => shared.run_ended(ended, &mut probes),
                () = sleep_until(due) => {}
            }
        }
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Entries are changed one at a time: a panic elsewhere leaves the table usable.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Probes have ended, and with them their metrics.
    fn end(&self, ended: &[Ended]) {
        for Ended { pod, target, has_namesake } in ended {
            self.metrics.probes.ended(&of(pod, target), *has_namesake);
        }
    }

    /// Starts everything that is due. Returns when the next probe is.
    fn start_due(
        self: &Arc<Self>,
        runs: &mut JoinSet<Done>,
        probes: &mut HashMap<task::Id, ProbeId>,
    ) -> Option<Instant> {
        let now = Instant::now();
        let mut table = self.table();
        while let Some(job) = table.take_due(now) {
            let (id, shared) = (job.probe, self.clone());
            let run = runs.spawn(async move { shared.run(job).await });
            probes.insert(run.id(), id);
            table.running(id, run);
        }
        table.next_due()
    }

    /// One run of a probe, in a task of its own.
    async fn run(self: Arc<Self>, job: Job) -> Done {
        let began = Instant::now();
        let pod = pod_ref(&job.pod);
        let runs = || self.pods.may_run(&pod.uid, &job.container);
        if !runs() {
            return Done { job, outcome: None, took: Duration::ZERO };
        }
        let if_unneeded = || (!job.target.needs_address()).then(String::new);
        let outcome = match self.address(&job.pod, &pod.uid).or_else(if_unneeded) {
            Some(address) => {
                let (container, target, timeout) = (&job.container, &*job.target, job.timeout);
                let subject = Subject { pod: &pod, container, address: &address, target, timeout };
                self.runner.run(&subject).await
            }
            None => Outcome::Error { state: "unknown", message: "the pod has no address".to_owned() },
        };
        // A container that ends while it is probed does not fail its probe.
        let outcome = Some(outcome).filter(|outcome| *outcome == Outcome::Success || runs());
        Done { job, outcome, took: began.elapsed() }
    }

    /// The pod's address; an empty one for the node's if that is not known.
    fn address(&self, pod: &Pod, uid: &PodUid) -> Option<String> {
        self.pods.address(uid).or_else(|| spec::host_network(pod).then(String::new))
    }

    fn run_ended(&self, ended: Result<(task::Id, Done), JoinError>, probes: &mut HashMap<task::Id, ProbeId>) {
        let now = Instant::now();
        match ended {
            Ok((run, done)) => {
                probes.remove(&run);
                let result = result_of(done.outcome.as_ref());
                let is_current = self.table().complete(done.job.probe, run, result, now);
                if let Some(outcome) = done.outcome.filter(|_| is_current) {
                    self.report(&done.job, &outcome, done.took);
                }
            }
            Err(error) => {
                // Aborted with its instance, whose next one is scheduled already, or ended by a panic.
                if let Some(probe) = probes.remove(&error.id()).filter(|_| error.is_panic()) {
                    tracing::error!(%error, "a probe ended abnormally");
                    self.table().complete(probe, error.id(), RunResult::Error, now);
                }
            }
        }
    }

    /// Events and metrics of a run.
    fn report(&self, job: &Job, outcome: &Outcome, took: Duration) {
        let (kind, of) = (label(job.target.kind), of(&job.pod, &job.target));
        let event = |reason, message: String| {
            self.recorder.pod_event(&job.pod, &job.target.field_path(), EventType::Warning, reason, &message);
        };
        match outcome {
            Outcome::Success => self.metrics.probes.succeeded(&of, took),
            Outcome::Warning(output) => {
                event("ProbeWarning", format!("{kind} probe warning: {output}"));
                self.metrics.probes.succeeded(&of, took);
            }
            Outcome::Failure(output) => {
                event("Unhealthy", format!("{kind} probe failed: {output}"));
                self.metrics.probes.failed(&of);
            }
            Outcome::Error { state, message } => {
                event("Unhealthy", format!("{kind} probe errored and resulted in {state} state: {message}"));
            }
        }
    }
}

fn result_of(outcome: Option<&Outcome>) -> RunResult {
    match outcome {
        Some(Outcome::Success | Outcome::Warning(_)) => RunResult::Success,
        Some(Outcome::Failure(_)) => RunResult::Failure,
        Some(Outcome::Error { .. }) | None => RunResult::Error,
    }
}

/// The labels of a probe's metrics.
fn of<'a>(pod: &'a Pod, target: &'a Target) -> ProbeOf<'a> {
    let metadata = &pod.metadata;
    ProbeOf {
        kind: label(target.kind),
        container: &target.container.name,
        pod: metadata.name.as_deref().unwrap_or_default(),
        namespace: metadata.namespace.as_deref().unwrap_or_default(),
        uid: metadata.uid.as_deref().unwrap_or_default(),
    }
}

/// The first tick since `epoch` at which everything due at `due` is due.
fn next_tick(epoch: Instant, due: Instant) -> Instant {
    let since = due.saturating_duration_since(epoch);
    // Less than a tick, which is far less than 2^64 ns.
    let past = Duration::from_nanos(u64::try_from(since.as_nanos() % TICK.as_nanos()).unwrap_or_default());
    let missing = if past.is_zero() { past } else { TICK - past };
    epoch + since + missing
}

#[cfg(test)]
mod tests {
    use keblet_proto::cri::v1::ExecSyncResponse;
    use serde_json::json;
    use tokio_util::task::AbortOnDropHandle;

    use super::*;
    use crate::model::ProbeKind;
    use crate::model::testing;
    use crate::runtime::RuntimeOptions;
    use crate::runtime::tests::server::Socket;
    use crate::runtime::tests::server::say;
    use crate::runtime::tests::server::script;

    struct WithoutAddress;

    impl ProbedPods for WithoutAddress {
        fn address(&self, _: &PodUid) -> Option<String> {
            None
        }

        fn may_run(&self, _: &PodUid, _: &ContainerId) -> bool {
            true
        }

        fn last_status(&self, _: &Pod) -> Option<PodStatus> {
            None
        }
    }

    /// Some runtimes report nothing of a sandbox's network.
    #[tokio::test(start_paused = true)]
    async fn a_command_is_run_without_an_address_of_its_pod() {
        let (socket, results) = (Socket::default(), ProbeResultStore::default());
        socket.serve(script(|_, _| say(&ExecSyncResponse::default())));
        let options = RuntimeOptions::default();
        let prober = Prober::new(Parts {
            runtime: Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), options),
            results: results.clone(),
            pods: Arc::new(WithoutAddress),
            version: "v1.36.3",
            expand: |command, _| Ok(command.to_vec()),
            clock: Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_nanos(testing::T0.unsigned_abs())),
            recorder: Recorder::logging("node"),
            metrics: Metrics::new(),
        });
        let mut pod = testing::pod("Always", &[], &["a"]);
        let probe = serde_json::from_value(json!({ "exec": { "command": ["check"] } })).expect("a probe");
        pod.spec.as_mut().expect("a spec").containers[0].readiness_probe = Some(probe);
        prober.observe(&Arc::new(pod), &testing::snapshot(vec![testing::running("a", 0)]));
        let _running = AbortOnDropHandle::new(tokio::spawn(prober.run(CancellationToken::new())));
        let (uid, id) = (PodUid::from("uid"), ContainerId::from("a-0"));
        let is_ready = async {
            while !results.of_pod(&uid).permits(ProbeKind::Readiness, &id) {
                results.changed_pods().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), is_ready).await.expect("it is ready");
    }

    #[test]
    fn a_warning_is_a_success_and_an_error_counts_for_nothing() {
        let text = || "moved".to_owned();
        for (outcome, expected) in [
            (Some(Outcome::Success), RunResult::Success),
            (Some(Outcome::Warning(text())), RunResult::Success),
            (Some(Outcome::Failure(text())), RunResult::Failure),
            (Some(Outcome::Error { state: "unknown", message: text() }), RunResult::Error),
            // Upstream's name of the state is not its effect.
            (Some(Outcome::Error { state: "failure", message: text() }), RunResult::Error),
            (None, RunResult::Error),
        ] {
            assert_eq!(result_of(outcome.as_ref()), expected, "{outcome:?}");
        }
    }

    #[test]
    fn ticks_are_multiples_of_a_period_also_after_years() {
        let epoch = Instant::now();
        let years = Duration::from_secs(3 * 365 * 24 * 3600);
        for (due, expected) in [(0, 0), (1, 20), (20, 20), (21, 40), (40, 40)] {
            let (due, expected) = (Duration::from_millis(due), Duration::from_millis(expected));
            assert_eq!(next_tick(epoch, epoch + due), epoch + expected);
            assert_eq!(next_tick(epoch, epoch + years + due), epoch + years + expected);
        }
        assert_eq!(next_tick(epoch + TICK, epoch), epoch + TICK);
    }
}
