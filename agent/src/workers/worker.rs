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

use super::act;
use super::act::ActContext;
use super::backoff::BackoffHistory;
use super::gate::StartGate;
use super::mailbox::Mailbox;
use super::state::Phase;
use super::state::requeue_after;
use super::syncing;
use crate::model::Clock;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::restart::RestartGates;
use crate::objects::Interest;
use crate::pleg::InspectError;
use crate::pleg::PlegHandle;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::runtime::RuntimeState;
use crate::status::Statuses;
use crate::telemetry;

/// The remains of a pod that is over stay this long at least.
const REMAINS_DELAY: Duration = Duration::from_secs(1);

/// What all workers share.
pub struct WorkerContext {
    /// The pod cache.
    pub pleg: PlegHandle,
    /// Effects.
    pub act: ActContext,
    /// Published statuses.
    pub statuses: Statuses,
    /// Full names of static pods.
    pub gate: StartGate,
    /// Time.
    pub clock: Clock,
    /// Events.
    pub recorder: Recorder,
    /// Is the runtime ready?
    pub runtime: watch::Receiver<RuntimeState>,
    /// Feature gates of restarts.
    pub gates: RestartGates,
    /// Longest crash-loop back-off.
    pub max_backoff: Duration,
    /// Counts.
    pub observer: Arc<dyn WorkerObserver>,
    /// The agent is ending: no worker begins anything new.
    pub ending: CancellationToken,
}

/// Counts what workers do. Calls must be quick.
pub trait WorkerObserver: Send + Sync + 'static {
    /// A plan was made.
    fn planned(&self, took: Duration);
    /// A plan was executed; `starts` containers were tried, `failed` of them failed.
    fn acted(&self, took: Duration, outcome: &crate::model::SyncOutcome);
    /// One pass of a worker ended; `operation` is upstream's `operation_type`.
    fn pass(&self, operation: &'static str, took: Duration);
}

/// Counts nothing.
pub struct NoWorkerObserver;

impl WorkerObserver for NoWorkerObserver {
    fn planned(&self, _took: Duration) {}
    fn acted(&self, _took: Duration, _outcome: &crate::model::SyncOutcome) {}
    fn pass(&self, _operation: &'static str, _took: Duration) {}
}

/// What a pass leads to.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// Nothing to do until news, or until then.
    Wait(Option<Instant>),
    /// The pod has entered its next phase.
    Phase,
}

/// One pod's worker.
pub struct Worker {
    pub(super) uid: PodUid,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) context: Arc<WorkerContext>,
    pub(super) history: BackoffHistory,
    pub(super) syncing: syncing::Memory,
    /// The pod's claim on API objects; ends with the worker.
    pub(super) interest: Interest,
    /// When the worker's own last action ended: older snapshots do not count.
    pub(super) acted_at: Option<Instant>,
}

impl Worker {
    /// A worker that has done nothing yet.
    pub fn new(uid: PodUid, mailbox: Arc<Mailbox>, context: Arc<WorkerContext>) -> Self {
        let history = BackoffHistory::for_crash_loops(context.max_backoff);
        let interest = Interest::new(uid.clone());
        Self { uid, mailbox, context, history, syncing: syncing::Memory::default(), interest, acted_at: None }
    }

    /// Works until the pod is finished, or the agent ends: then what is under way is completed first.
    pub async fn run(mut self) {
        let ending = self.context.ending.clone();
        let mut due: Option<Instant> = None;
        loop {
            let Some(phase) = ending.run_until_cancelled(self.next_work(due)).await else { break };
            if phase == Phase::Finished || ending.run_until_cancelled(self.enter(phase)).await != Some(true) {
                break;
            }
            let began = Instant::now();
            let (operation, name) = match phase {
                Phase::Syncing => ("sync", "syncPod"),
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
            let next = pass.instrument(span).await;
            self.context.observer.pass(operation, began.elapsed());
            due = match next {
                Next::Wait(due) => due,
                Next::Phase => None,
            };
            if self.mailbox.state().phase() == Phase::Finished {
                break;
            }
        }
    }

    async fn next_work(&mut self, due: Option<Instant>) -> Phase {
        loop {
            if let Some(phase) = self.mailbox.state().take_work() {
                return phase;
            }
            let later = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.mailbox.woken() => {}
                () = later => return self.mailbox.state().phase(),
                () = self.interest.changed() => {
                    let phase = self.mailbox.state().phase();
                    if phase == Phase::Syncing {
                        return phase;
                    }
                }
            }
        }
    }

    /// Waits at the start gate, if this is a static pod. Returns false if the pod is done with before it began.
    async fn enter(&self, phase: Phase) -> bool {
        let Some(full_name) = self.static_full_name() else {
            self.mailbox.state().start();
            return true;
        };
        let started = self.mailbox.state().was_started();
        if started {
            return true;
        }
        self.context.gate.join(&full_name, &self.uid);
        loop {
            let freed = self.context.gate.freed();
            if phase > Phase::Syncing || self.mailbox.state().termination_requested() {
                self.context.gate.leave(&full_name, &self.uid);
                self.mailbox.state().finish_unstarted();
                return false;
            }
            if self.context.gate.try_enter(&full_name, &self.uid) {
                self.mailbox.state().start();
                return true;
            }
            tokio::select! {
                () = freed => {}
                () = self.mailbox.woken() => {}
            }
        }
    }

    fn static_full_name(&self) -> Option<String> {
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

    /// A snapshot that knows everything this worker has done.
    pub(super) async fn view(&mut self) -> Result<Arc<PodSnapshot>, InspectError> {
        let fresh = std::mem::take(&mut self.syncing.started);
        let pleg = &self.context.pleg;
        let Some(acted_at) = self.acted_at else { return pleg.view(&self.uid).await };
        match pleg.cached(&self.uid) {
            Some(snapshot) if snapshot.sampled_at > acted_at => Ok(snapshot),
            _ => pleg.inspect_with(&self.uid, fresh).await,
        }
    }

    /// Waits until the runtime is ready, or the agent ends; it makes no sense to act before.
    pub(super) async fn runtime_ready(&self) {
        let mut runtime = self.context.runtime.clone();
        let ready =
            self.context.ending.run_until_cancelled(async { runtime.wait_for(RuntimeState::is_ready).await.is_ok() });
        if ready.await == Some(false) {
            self.context.ending.cancelled().await;
        }
    }

    /// An action ended: snapshots from before are out of date.
    pub(super) fn acted(&mut self) {
        self.acted_at = Some(Instant::now());
    }

    pub(super) fn retry(&self, network_not_ready: bool) -> Next {
        let jitter = 1.0 + fastrand::f64() * 0.5;
        Next::Wait(Some(Instant::now() + requeue_after(network_not_ready, jitter)))
    }

    pub(super) fn failed_sync(&self, pod: &Pod, error: &InspectError) -> Next {
        let message = format!("error determining status: {error}");
        self.context.recorder.pod_event(pod, "", EventType::Warning, "FailedSync", &message);
        self.retry(false)
    }

    pub(super) fn at(&self, wall: SystemTime) -> Instant {
        Instant::now() + wall.duration_since(self.context.clock.wall()).unwrap_or_default()
    }

    /// Stops every container and sandbox of the pod. Runs again on every request until nothing is left running.
    async fn terminate(&mut self) -> Next {
        self.runtime_ready().await;
        let mut grace = self.mailbox.state().begin_terminating();
        let pod = self.pod();
        let view = match self.view().await {
            Ok(view) => view,
            Err(error) => {
                return match &pod {
                    Some(pod) => self.failed_sync(pod, &error),
                    None => self.retry(false),
                };
            }
        };
        if let Some(pod) = &pod {
            self.publish_status(pod, &view, false);
            let ending = self.mailbox.state().ending();
            if let Some(ending) = ending {
                self.context.statuses.end(pod, &ending, self.context.clock.wall());
            }
        }
        self.context.pleg.acting(&self.uid).await;
        let killed = match &pod {
            Some(pod) => loop {
                // Who is in more of a hurry meanwhile need not wait for the grace that was given first.
                tokio::select! {
                    killed = act::terminate_pod(&self.context.act, pod, &view, grace) => break killed,
                    shorter = self.shortened(grace) => grace = shorter,
                }
            },
            None => act::kill_orphan(&self.context.act, &view).await,
        };
        self.acted();
        let after = self.view().await;
        if let Err(error) = killed {
            if let Some(pod) = &pod {
                self.context.recorder.pod_event(pod, "", EventType::Warning, "FailedKillPod", &error);
            }
            tracing::warn!(pod = %self.pod_ref(), %error, "the pod is to be killed again");
            return self.retry(false);
        }
        match after {
            Ok(after) if after.running().next().is_none() => self.stopped(pod, &after).await,
            Ok(after) => {
                let left = after.running().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", ");
                tracing::warn!(pod = %self.pod_ref(), left, "containers still run after the pod was killed");
                self.retry(false)
            }
            Err(error) => match &pod {
                Some(pod) => self.failed_sync(pod, &error),
                None => self.retry(false),
            },
        }
    }

    /// The grace period, as soon as it is another one than this.
    async fn shortened(&self, grace: Option<i64>) -> Option<i64> {
        loop {
            self.mailbox.cancelled().await;
            let now = self.mailbox.state().begin_terminating();
            if now != grace {
                return now;
            }
        }
    }

    async fn stopped(&mut self, pod: Option<Pod>, after: &Arc<PodSnapshot>) -> Next {
        if let Some(pod) = &pod {
            self.publish_status(pod, after, true);
        } else {
            self.context.statuses.stopped(&self.uid, self.context.clock.wall());
            self.remove_content(after).await;
        }
        self.mailbox.state().terminating_done();
        Next::Phase
    }

    /// Releases volumes and cgroup, frees the name, and removes what is left if nobody wants to see it.
    async fn clean_up(&mut self) -> Next {
        let Some(pod) = self.pod() else {
            self.mailbox.state().terminated_done();
            return Next::Phase;
        };
        let view = match self.view().await {
            Ok(view) => view,
            Err(error) => return self.failed_sync(&pod, &error),
        };
        self.publish_status(&pod, &view, true);
        if let Err(error) = act::cleanup_pod(&self.context.act, &pod).await {
            tracing::warn!(pod = %self.pod_ref(), %error, "releasing the pod's volumes and cgroup failed");
            return self.retry(false);
        }
        self.context.statuses.terminate(&pod, self.context.clock.wall());
        if let Some(full_name) = self.static_full_name() {
            self.context.gate.leave(&full_name, &self.uid);
        }
        if self.mailbox.state().content_may_be_removed() {
            self.out_of_the_way().await;
            self.remove_content(&view).await;
        }
        self.mailbox.state().terminated_done();
        Next::Phase
    }

    /// Lets pods that are still ending go first: nobody waits for the remains of this one, unless it is to start anew.
    async fn out_of_the_way(&self) {
        let late = Instant::now() + REMAINS_DELAY;
        while !self.mailbox.state().restart_requested() {
            tokio::select! {
                () = self.mailbox.woken() => {}
                () = self.context.ending.cancelled() => return,
                () = tokio::time::sleep_until(late) => return,
            }
        }
    }

    /// Dead containers, sandboxes, logs and directories of a pod that nobody desires. What fails is found again by
    /// housekeeping.
    async fn remove_content(&mut self, view: &PodSnapshot) {
        self.context.pleg.acting(&self.uid).await;
        for error in act::remove_content(&self.context.act, view).await {
            tracing::warn!(pod = %self.pod_ref(), error, "remains of the pod were not removed");
        }
        self.acted();
        if let Err(error) = self.context.pleg.inspect(&self.uid).await {
            tracing::debug!(pod = %self.pod_ref(), %error, "the removed pod could not be looked at");
        }
    }
}
