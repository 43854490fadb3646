//! One pod's worker: takes work from its mailbox, brings the pod one phase or one plan further, waits.
//!
//! The only writer for its pod. It decides on nothing but a snapshot sampled after its own last action, so what it
//! has just started is never started twice; and it does not wait for events to learn what its actions led to.

use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::act::ActContext;
use super::act::SyncOutcome;
use super::backoff::BackoffHistory;
use super::mailbox::Mailbox;
use super::pass_metrics::PassMetrics;
use super::state::Phase;
use super::static_pod_start_queue::StaticPodStartQueue;
use super::syncing;
use super::terminating::Stopping;
use crate::model::Clock;
use crate::model::ContainerClass;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::backoff_delay;
use crate::model::restart::RestartGates;
use crate::objects::Registration;
use crate::pleg::InspectError;
use crate::pleg::PlegHandle;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::retry::Operation;
use crate::retry::RetryTracker;
use crate::runtime::RuntimeState;
use crate::startup;
use crate::status::Statuses;
use crate::telemetry;

/// Services of all workers.
pub struct WorkerContext {
    /// The pod cache.
    pub pleg: PlegHandle,
    /// Effects.
    pub act: ActContext,
    /// Published statuses.
    pub statuses: Statuses,
    /// Full names of static pods.
    pub static_pod_starts: StaticPodStartQueue,
    /// Time.
    pub clock: Clock,
    /// Events.
    pub recorder: Recorder,
    /// Failed operations.
    pub retries: RetryTracker,
    /// Is the runtime ready?
    pub runtime: watch::Receiver<RuntimeState>,
    /// Feature gates of restarts.
    pub gates: RestartGates,
    /// Longest crash-loop back-off.
    pub max_backoff: Duration,
    /// `syncFrequency`: how often pods whose containers are held back are looked at.
    pub sync_frequency: Duration,
    /// Counts.
    pub observer: Arc<dyn WorkerObserver>,
    /// The agent stops: no worker begins anything new.
    pub shutdown: CancellationToken,
}

/// Metrics of workers. Calls must not block.
pub trait WorkerObserver: Send + Sync + 'static {
    /// A plan was made.
    fn planned(&self, took: Duration);
    /// A plan was executed; `starts` containers were tried, `failed` of them failed.
    fn acted(&self, took: Duration, outcome: &SyncOutcome);
    /// One pass of a worker ended; `operation` is upstream's `operation_type`.
    fn pass(&self, operation: &'static str, took: Duration);
    /// The first pass over a pod begins, so long after its source brought it, if that is known.
    fn begun(&self, pod: &Pod, since_seen: Option<Duration>);
    /// A container has exited with a known reason. Once per container and agent.
    fn died(&self, class: ContainerClass, exit_code: i32, reason: &str);
    /// A pod (`fixed`: a static one) is started again under a finished UID.
    fn restarted(&self, fixed: bool);
    /// The runtime has a pod without worker.
    fn orphaned(&self);
    /// A pod was not let in, with this reason in its status.
    fn rejected(&self, reason: &str);
}

/// No metrics.
pub struct NoWorkerObserver;

impl WorkerObserver for NoWorkerObserver {
    fn planned(&self, _took: Duration) {}
    fn acted(&self, _took: Duration, _outcome: &SyncOutcome) {}
    fn pass(&self, _operation: &'static str, _took: Duration) {}
    fn begun(&self, _pod: &Pod, _since_seen: Option<Duration>) {}
    fn died(&self, _class: ContainerClass, _exit_code: i32, _reason: &str) {}
    fn restarted(&self, _fixed: bool) {}
    fn orphaned(&self) {}
    fn rejected(&self, _reason: &str) {}
}

/// What a pass leads to.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// Nothing to do until a request, a runtime event, or then.
    Wait(Option<Instant>),
    /// The pod has entered its next phase.
    Phase,
    /// The pass failed; the next attempt is due then.
    Retry(Instant),
}

/// One pod's worker.
pub struct Worker {
    pub(super) uid: PodUid,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) context: Arc<WorkerContext>,
    pub(super) history: BackoffHistory,
    pub(super) syncing: syncing::SyncState,
    /// The pod's registration for API objects; ends with the worker.
    pub(super) interest: Registration,
    /// When the worker's last action ended: older snapshots are out of date.
    pub(super) acted_at: Option<Instant>,
    /// The last snapshot of a pod whose containers have all exited and whose API object does not wait for its sandbox.
    pub(super) exited: Option<Arc<PodSnapshot>>,
    /// The stop of such a pod, still in progress.
    pub(super) stopping: Option<Stopping>,
    /// Failed passes in a row.
    failures: u32,
    /// After failures, no pass begins before this without a request of the sync loop.
    quiet_until: Option<Instant>,
    /// Metrics of this worker's passes.
    pub(super) pass_metrics: PassMetrics,
}

impl Worker {
    /// A worker before its first pass.
    pub fn new(uid: PodUid, mailbox: Arc<Mailbox>, context: Arc<WorkerContext>) -> Self {
        let history = BackoffHistory::for_crash_loops(context.max_backoff);
        let interest = Registration::new(uid.clone());
        let (syncing, pass_metrics) = (syncing::SyncState::default(), PassMetrics::default());
        Self {
            uid,
            mailbox,
            context,
            history,
            syncing,
            interest,
            acted_at: None,
            exited: None,
            stopping: None,
            failures: 0,
            quiet_until: None,
            pass_metrics,
        }
    }

    /// Runs passes until the pod is finished or the agent stops; a pass in progress is completed first.
    pub async fn run(mut self) {
        let shutdown = self.context.shutdown.clone();
        let mut due: Option<Instant> = None;
        loop {
            let Some(phase) = shutdown.run_until_cancelled(self.next_work(due)).await else { break };
            if phase == Phase::Finished || shutdown.run_until_cancelled(self.enter(phase)).await != Some(true) {
                break;
            }
            let began = Instant::now();
            let (operation, name) = match phase {
                Phase::Syncing => (self.begin_pass(), "syncPod"),
                Phase::Terminating => ("terminating", "syncTerminatingPod"),
                Phase::Terminated | Phase::Finished => ("terminated", "syncTerminatedPod"),
            };
            let span = telemetry::pod_pass(name, operation, &self.pod_ref());
            let pass = async {
                match phase {
                    Phase::Syncing => self.sync().await,
                    Phase::Terminating => self.terminate().await,
                    Phase::Terminated | Phase::Finished => self.clean_up().await,
                }
            };
            // Boxed: a pass needs many times the memory that a waiting worker does.
            let next = Box::pin(pass.instrument(span)).await;
            self.context.observer.pass(operation, began.elapsed());
            due = match next {
                Next::Wait(due) => due,
                Next::Phase => None,
                Next::Retry(due) => Some(due),
            };
            if !matches!(next, Next::Retry(_)) {
                self.pass_succeeded();
            }
            if self.mailbox.state().phase() == Phase::Finished {
                break;
            }
        }
    }

    /// The kind of pass that begins, as the kubelet's `operation_type`.
    fn begin_pass(&mut self) -> &'static str {
        let updated = self.mailbox.state().take_update();
        let Some(pod) = self.pod() else { return "sync" };
        if !std::mem::replace(&mut self.pass_metrics.begun, true) {
            let seen = startup::first_seen(&pod);
            let since_seen = seen.and_then(|seen| self.context.clock.wall().duration_since(seen).ok());
            self.context.observer.begun(&pod, since_seen);
            return "create";
        }
        if updated { "update" } else { "sync" }
    }

    async fn next_work(&mut self, due: Option<Instant>) -> Phase {
        loop {
            let quiet_until = self.quiet_until.filter(|until| *until > Instant::now());
            let work = match quiet_until {
                Some(_) => self.mailbox.state().take_request(),
                None => self.mailbox.state().take_work(),
            };
            if let Some(phase) = work {
                return phase;
            }
            tokio::select! {
                () = self.mailbox.woken() => {}
                () = sleep_until(quiet_until), if quiet_until.is_some() => {}
                () = sleep_until(due) => return self.mailbox.state().phase(),
                () = self.interest.changed() => {
                    let phase = self.mailbox.state().phase();
                    if phase == Phase::Syncing {
                        return phase;
                    }
                }
            }
        }
    }

    /// Waits in the start queue if this is a static pod. Returns false if the pod is done with before it began.
    async fn enter(&self, phase: Phase) -> bool {
        let Some(full_name) = self.static_full_name() else {
            self.mailbox.state().start();
            return true;
        };
        let started = self.mailbox.state().was_started();
        if started {
            return true;
        }
        self.context.static_pod_starts.enqueue(&full_name, &self.uid);
        loop {
            let released = self.context.static_pod_starts.released();
            if phase > Phase::Syncing || self.mailbox.state().termination_requested() {
                self.context.static_pod_starts.release(&full_name, &self.uid);
                self.mailbox.state().finish_unstarted();
                return false;
            }
            if self.context.static_pod_starts.try_acquire(&full_name, &self.uid) {
                self.mailbox.state().start();
                return true;
            }
            tokio::select! {
                () = released => {}
                () = self.mailbox.woken() => {}
            }
        }
    }

    pub(super) fn static_full_name(&self) -> Option<String> {
        let state = self.mailbox.state();
        let pod = state.pod.as_ref()?;
        crate::model::spec::is_static(pod).then(|| state.pod_ref.full_name())
    }

    pub(super) fn pod(&self) -> Option<Pod> {
        self.mailbox.state().pod.clone()
    }

    pub(super) fn pod_ref(&self) -> PodRef {
        self.mailbox.state().pod_ref.clone()
    }

    /// A snapshot sampled after this worker's last action.
    pub(super) async fn view(&mut self) -> Result<Arc<PodSnapshot>, InspectError> {
        let fresh = std::mem::take(&mut self.syncing.started);
        let pleg = &self.context.pleg;
        let viewed = match (self.acted_at, pleg.cached(&self.uid)) {
            (None, _) => pleg.view(&self.uid).await,
            (Some(acted_at), Some(snapshot)) if snapshot.sampled_at > acted_at => Ok(snapshot),
            (Some(_), _) => pleg.inspect_with(&self.uid, fresh).await,
        };
        if let Ok(view) = &viewed {
            let pod = self.pod();
            self.pass_metrics.observe_exits(pod.as_deref(), view, &*self.context.observer);
        }
        viewed
    }

    /// Waits until the runtime is ready, or the agent stops.
    pub(super) async fn runtime_ready(&self) {
        let mut runtime = self.context.runtime.clone();
        let ready =
            self.context.shutdown.run_until_cancelled(async { runtime.wait_for(RuntimeState::is_ready).await.is_ok() });
        if ready.await == Some(false) {
            self.context.shutdown.cancelled().await;
        }
    }

    /// An action ended: older snapshots are out of date.
    pub(super) fn acted(&mut self) {
        self.acted_at = Some(Instant::now());
    }

    /// A pass failed: when the next one is due. Pauses grow, with the kubelet's requeue times as the first ones.
    pub(super) fn retry(&mut self, operation: Operation, reason: &str) -> Next {
        let due = self.context.retries.failed(operation, &self.pod_ref().with_uid(), reason);
        self.failures = self.failures.saturating_add(1);
        // A failing pass may itself cause runtime events: they are not to start the next pass at once for ever.
        let quiet = backoff_delay(QUIET_FIRST, QUIET_MAX, self.failures - 1);
        self.quiet_until = (self.failures > 1).then(|| Instant::now() + quiet);
        Next::Retry(due)
    }

    /// A pass succeeded: the next failure is the first again.
    fn pass_succeeded(&mut self) {
        if std::mem::take(&mut self.failures) > 0 {
            self.quiet_until = None;
            let target = self.pod_ref().with_uid();
            for operation in PASSES {
                self.context.retries.succeeded(operation, &target);
            }
        }
    }

    pub(super) fn failed_sync(&mut self, pod: &Pod, error: &InspectError) -> Next {
        let message = format!("error determining status: {error}");
        self.context.recorder.pod_event(pod, "", EventType::Warning, "FailedSync", &message);
        self.retry(Operation::SyncPod, &message)
    }

    pub(super) fn at(&self, wall: SystemTime) -> Instant {
        Instant::now() + wall.duration_since(self.context.clock.wall()).unwrap_or_default()
    }
}

/// What a pass of a worker can fail at.
const PASSES: [Operation; 4] = [Operation::SyncPod, Operation::AwaitNetwork, Operation::KillPod, Operation::ReleasePod];
/// From the second failure in a row on, runtime events start a pass after this at the earliest; doubling.
const QUIET_FIRST: Duration = Duration::from_secs(1);
/// The longest such pause.
const QUIET_MAX: Duration = Duration::from_secs(10);

/// Sleeps until then; for ever without a time.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
