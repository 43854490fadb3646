//! One pod's worker: takes work from its mailbox, brings the pod one phase or one plan further, waits.
//!
//! The only writer for its pod. It decides on nothing but a snapshot sampled after its own last action, so a container that
//! it has just started is never started twice; and it does not wait for events to see the results of its actions.

use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::act::ActContext;
use super::act::PassContext;
use super::act::SyncOutcome;
use super::backoff::BackoffHistory;
use super::mailbox::Mailbox;
use super::pass_metrics::PassMetrics;
use super::publish::StatusSources;
use super::state::Phase;
use super::static_pod_start_queue::StaticPodStartQueue;
use super::sync_state::SyncState;
use super::terminating::Stopped;
use super::volume_refresh::earliest;
use super::volume_refresh::refresh_ended;
use crate::model::Clock;
use crate::model::ContainerClass;
use crate::model::ContainerId;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::backoff_delay;
use crate::model::restart::RestartGates;
use crate::model::restart::RestartPolicy;
use crate::model::sleep_until;
use crate::objects::Registration;
use crate::pleg::InspectError;
use crate::pleg::MessageSource;
use crate::pleg::PlegHandle;
use crate::pleg::TerminationMessages;
use crate::probes::ProbeResultStore;
use crate::probes::Prober;
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
    /// Published results of probes.
    pub probes: ProbeResultStore,
    /// Probes containers.
    pub prober: Prober,
    /// Full names of static pods.
    pub static_pod_starts: StaticPodStartQueue,
    /// Time.
    pub clock: Clock,
    /// Events.
    pub recorder: Recorder,
    /// Failed operations.
    pub retries: RetryTracker,
    /// Whether the runtime is ready.
    pub runtime: watch::Receiver<RuntimeState>,
    /// Feature gates of restarts.
    pub gates: RestartGates,
    /// Longest crash-loop back-off.
    pub max_backoff: Duration,
    /// `syncFrequency`: how often pods whose containers are held back are synced.
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
    /// A plan was executed.
    fn acted(&self, took: Duration, outcome: &SyncOutcome);
    /// One pass of a worker ended; `operation` is upstream's `operation_type`.
    fn pass(&self, operation: &'static str, took: Duration);
    /// The first pass over a pod begins, so long after its source brought it, if that is known.
    fn begun(&self, pod: &Pod, since_seen: Option<Duration>);
    /// A container has exited with a known reason. Once per container, also across restarts of the agent.
    fn container_exited(&self, class: ContainerClass, exit_code: i32, reason: &str);
    /// A pod (`fixed`: a static one) is started again under a finished UID.
    fn restarted(&self, fixed: bool);
    /// The runtime runs a pod that no source desires and that has no worker.
    fn orphaned(&self);
    /// A pod was rejected at admission, with this reason in its status.
    fn rejected(&self, reason: &str);
    /// A pod was evicted in favour of a critical one that lacked this resource.
    fn preempted(&self, resource: &str);
}

/// No metrics.
pub struct NoWorkerObserver;

impl WorkerObserver for NoWorkerObserver {
    fn planned(&self, _took: Duration) {}
    fn acted(&self, _took: Duration, _outcome: &SyncOutcome) {}
    fn pass(&self, _operation: &'static str, _took: Duration) {}
    fn begun(&self, _pod: &Pod, _since_seen: Option<Duration>) {}
    fn container_exited(&self, _class: ContainerClass, _exit_code: i32, _reason: &str) {}
    fn restarted(&self, _fixed: bool) {}
    fn orphaned(&self) {}
    fn rejected(&self, _reason: &str) {}
    fn preempted(&self, _resource: &str) {}
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

/// What a worker keeps between passes in each phase.
pub(super) enum PhaseData {
    Syncing(Box<SyncState>),
    Terminating {
        /// The pod was inspected in this phase: what is cached shows every container that was started.
        is_inspected: bool,
    },
    Terminated(Stopped),
}

/// The worker's last action. Older snapshots are out of date.
struct LastAction {
    ended_at: Instant,
    /// Containers started since the last snapshot.
    started: Vec<ContainerId>,
    /// Containers whose resources were changed since then. The runtime lists them as before: only their status shows it.
    resized: Vec<ContainerId>,
}

impl LastAction {
    fn is_shown_by(&self, snapshot: &PodSnapshot) -> bool {
        self.resized.is_empty() && snapshot.sampled_at > self.ended_at
    }
}

/// Failed passes in a row.
struct Failing {
    count: u32,
    /// No pass begins before this without a request of the sync loop.
    quiet_until: Option<Instant>,
}

/// One pod's worker.
pub struct Worker {
    pub(super) pod_ref: PodRef,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) context: Arc<WorkerContext>,
    pub(super) phase: PhaseData,
    pub(super) history: BackoffHistory,
    pub(super) status: StatusSources,
    pub(super) messages: TerminationMessages,
    /// The pod's registration for API objects; ends with the worker.
    pub(super) interest: Registration,
    last_action: Option<LastAction>,
    failing: Option<Failing>,
    /// Metrics of this worker's passes.
    pub(super) pass_metrics: PassMetrics,
}

impl Worker {
    /// A worker before its first pass.
    pub fn new(mailbox: Arc<Mailbox>, context: Arc<WorkerContext>) -> Self {
        let pod_ref = mailbox.state().pod_ref.clone();
        let status = StatusSources::new(&context.act.allocations, &pod_ref.uid);
        Self {
            interest: Registration::new(pod_ref.uid.clone()),
            pod_ref,
            mailbox,
            phase: PhaseData::Syncing(Box::default()),
            history: BackoffHistory::for_crash_loops(context.max_backoff),
            messages: context.pleg.termination_messages(),
            context,
            status,
            last_action: None,
            failing: None,
            pass_metrics: PassMetrics::default(),
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
            let span = telemetry::pod_pass(name, operation, &self.pod_ref);
            // Boxed: a pass needs many times the memory that a waiting worker does.
            let next = Box::pin(self.pass(phase).instrument(span)).await;
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
        if self.mailbox.state().phase() == Phase::Finished {
            self.context.prober.remove(self.uid());
            self.context.probes.remove_pod(self.uid());
        }
    }

    async fn pass(&mut self, phase: Phase) -> Next {
        match phase {
            Phase::Syncing => {
                let terminating = PhaseData::Terminating { is_inspected: false };
                let mut state = match std::mem::replace(&mut self.phase, terminating) {
                    PhaseData::Syncing(state) => state,
                    PhaseData::Terminating { .. } | PhaseData::Terminated(_) => Box::default(),
                };
                let next = self.sync(&mut state).await;
                self.phase = PhaseData::Syncing(state);
                next
            }
            Phase::Terminating => {
                if !matches!(self.phase, PhaseData::Terminating { .. }) {
                    self.phase = PhaseData::Terminating { is_inspected: false };
                }
                self.terminate().await
            }
            Phase::Terminated | Phase::Finished => self.clean_up().await,
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

    async fn next_work(&mut self, mut due: Option<Instant>) -> Phase {
        loop {
            let (sooner, check) = self.check_clock();
            due = earliest(due, sooner);
            let quiet_until = self.failing.as_ref().and_then(|failing| failing.quiet_until);
            let quiet_until = quiet_until.filter(|until| *until > Instant::now());
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
                () = sleep_until(earliest(due, check)) => {
                    if due.is_some_and(|due| due <= Instant::now()) {
                        return self.mailbox.state().phase();
                    }
                }
                refreshed = refresh_ended(&mut self.phase) => due = earliest(due, self.refreshed(refreshed)),
                () = self.interest.changed() => {
                    let phase = self.mailbox.state().phase();
                    if phase == Phase::Syncing {
                        return phase;
                    }
                }
            }
        }
    }

    /// Waits in the start queue if this is a static pod. Returns false if the pod is finished before it was started.
    async fn enter(&self, phase: Phase) -> bool {
        let Some(full_name) = self.static_full_name() else {
            self.mailbox.state().start();
            return true;
        };
        let started = self.mailbox.state().was_started();
        if started {
            return true;
        }
        self.context.static_pod_starts.enqueue(&full_name, &self.pod_ref.uid);
        loop {
            let released = self.context.static_pod_starts.released();
            if phase > Phase::Syncing || self.mailbox.state().termination_requested() {
                self.context.static_pod_starts.release(&full_name, &self.pod_ref.uid);
                self.mailbox.state().finish_unstarted();
                return false;
            }
            if self.context.static_pod_starts.try_acquire(&full_name, &self.pod_ref.uid) {
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
        let pod = self.pod()?;
        crate::model::spec::is_static(&pod).then(|| self.pod_ref.full_name())
    }

    pub(super) fn pod(&self) -> Option<Pod> {
        self.mailbox.state().pod.clone()
    }

    /// The pod and its [content](super::state::PodState::content).
    pub(super) fn pod_with_content(&self) -> Option<(Pod, u64)> {
        let state = self.mailbox.state();
        state.pod.clone().map(|pod| (pod, state.content()))
    }

    pub(super) fn uid(&self) -> &PodUid {
        &self.pod_ref.uid
    }

    /// Whether [`Self::view`] needs no answer of the runtime.
    pub(super) fn has_view(&self) -> bool {
        let cached = self.context.pleg.cached(self.uid());
        cached.is_some_and(|snapshot| self.last_action.as_ref().is_none_or(|last| last.is_shown_by(&snapshot)))
    }

    /// A snapshot sampled after this worker's last action, with the termination messages of exits that the runtime has not
    /// reported yet.
    pub(super) async fn view(&mut self) -> Result<Arc<PodSnapshot>, InspectError> {
        let (pleg, uid) = (&self.context.pleg, &self.pod_ref.uid);
        let viewed = match &mut self.last_action {
            None => pleg.view(uid).await,
            Some(last) => {
                let mut fresh = std::mem::take(&mut last.started);
                match pleg.cached(uid).filter(|snapshot| last.is_shown_by(snapshot)) {
                    Some(snapshot) => Ok(snapshot),
                    None => {
                        fresh.extend(last.resized.iter().cloned());
                        let inspected = pleg.inspect_with(uid, fresh).await;
                        if inspected.is_ok() {
                            last.resized.clear();
                        }
                        inspected
                    }
                }
            }
        };
        let (view, pod) = (viewed?, self.pod());
        let known = |pod: &ApiPod| self.context.statuses.last_known(pod);
        self.pass_metrics.observe_exits(pod.as_deref(), known, &view, &*self.context.observer);
        Ok(self.messages.complete(view, self.message_source()).await)
    }

    /// The status of a pod that can end shows every message with the exit. A restart does not wait for a log.
    fn message_source(&self) -> MessageSource {
        let state = self.mailbox.state();
        let can_end = state.pod.as_ref().is_none_or(|pod| RestartPolicy::of_pod(pod) != RestartPolicy::Always);
        match can_end || state.termination_requested() {
            true => MessageSource::FileOrLog,
            false => MessageSource::File,
        }
    }

    /// The context of a pass over this pod as of this snapshot.
    pub(super) fn pass_context(&self, pod: Pod, snapshot: Arc<PodSnapshot>) -> PassContext {
        PassContext::new(self.pod_ref.clone(), pod, snapshot, self.mailbox.state().termination_options())
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
        self.acted_on(Vec::new(), Vec::new());
    }

    /// As [`Self::acted`], for an action that started or resized containers.
    pub(super) fn acted_on(&mut self, mut started: Vec<ContainerId>, mut resized: Vec<ContainerId>) {
        if let Some(last) = &mut self.last_action {
            started.append(&mut last.started);
            resized.append(&mut last.resized);
        }
        self.last_action = Some(LastAction { ended_at: Instant::now(), started, resized });
    }

    /// A pass failed: when the next one is due. Pauses grow, with the kubelet's requeue times as the first ones.
    pub(super) fn retry(&mut self, operation: Operation, reason: &str) -> Next {
        let due = self.context.retries.failed(operation, &self.pod_ref.with_uid(), reason);
        let count = self.failing.as_ref().map_or(0, |failing| failing.count).saturating_add(1);
        // A failing pass may itself cause runtime events, which must not start the next pass at once each time.
        let quiet = backoff_delay(QUIET_FIRST, QUIET_MAX, count - 1);
        self.failing = Some(Failing { count, quiet_until: (count > 1).then(|| Instant::now() + quiet) });
        Next::Retry(due)
    }

    /// A pass succeeded: the next failure is the first again.
    fn pass_succeeded(&mut self) {
        if self.failing.take().is_some() {
            let target = self.pod_ref.with_uid();
            for operation in PASSES {
                self.context.retries.succeeded(operation, &target);
            }
        }
    }

    pub(super) fn failed_sync(&mut self, pod: &Pod, error: &InspectError) -> Next {
        // The agent ends, and the next one inspects the pod again.
        if matches!(error, InspectError::Stopped) {
            return Next::Wait(None);
        }
        let message = format!("error determining status: {error}");
        self.context.recorder.pod_event(pod, "", EventType::Warning, "FailedSync", &message);
        self.retry(Operation::SyncPod, &message)
    }

    pub(super) fn at(&self, wall: SystemTime) -> Instant {
        Instant::now() + wall.duration_since(self.context.clock.wall()).unwrap_or_default()
    }
}

/// Operations of which a pass of a worker consists.
const PASSES: [Operation; 4] = [Operation::SyncPod, Operation::AwaitNetwork, Operation::KillPod, Operation::ReleasePod];
/// From the second failure in a row on, runtime events start a pass after this at the earliest; doubling.
const QUIET_FIRST: Duration = Duration::from_secs(1);
/// The longest such pause.
const QUIET_MAX: Duration = Duration::from_secs(10);
