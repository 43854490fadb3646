//! The state machine of one pod UID: syncing → terminating → terminated → finished. Pure.
//!
//! Requests come from the sync loop, completions from the worker. Both go through here, so that what a worker does
//! next follows from this value alone. Rules: upstream's `UpdatePod` and its completions.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::model::Pod;
use crate::model::PodRef;
use crate::status::TerminationReason;
use crate::workers::act::TerminationOptions;

/// The name of a pod's phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub enum Phase {
    /// Containers may be started.
    Syncing,
    /// Containers are being stopped; none is started any more.
    Terminating,
    /// No container runs; volumes and cgroup are being released.
    Terminated,
    /// Nothing is left to do for this UID.
    Finished,
}

/// What the sync loop requests.
#[derive(Clone, Debug)]
pub enum Request {
    /// The pod is new to the agent.
    Create(Pod),
    /// Its spec, metadata or API status changed.
    Update(Pod),
    /// Something that the pod depends on has changed.
    Sync,
    /// Terminate it.
    Kill(KillOptions),
    /// Terminate a pod that only the runtime has.
    KillRuntimeOnly,
}

/// How to terminate a pod.
#[derive(Clone, Debug, Default)]
pub struct KillOptions {
    /// Replaces the pod's own grace period, in seconds.
    pub grace: Option<i64>,
    /// The pod is evicted: its containers may be removed at once.
    pub evicted: bool,
    /// Why the agent terminates it, for its status (eviction, node shutdown).
    pub termination_reason: Option<Arc<TerminationReason>>,
    /// Cancelled when no process of the pod runs: before its volumes and its cgroup are released.
    pub stopped: Option<CancellationToken>,
    /// Cancelled when nothing is left to do for the pod.
    pub finished: Option<CancellationToken>,
}

impl KillOptions {
    /// There is nothing to wait for: cancels the tokens.
    pub fn ended(&self) {
        self.stopped.iter().chain(&self.finished).for_each(CancellationToken::cancel);
    }
}

/// What a request leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reaction {
    /// The worker has something to do.
    pub wake: bool,
    /// What the worker is doing is out of date: it may stop waiting.
    pub cancel: bool,
}

/// A termination from its first request to its end.
#[derive(Clone, Debug, Default)]
struct Termination {
    /// No source desires the pod any more, or its API object is being deleted.
    deleted: bool,
    /// The pod is evicted.
    evicted: bool,
    /// Why the agent terminates the pod, if it does.
    reason: Option<Arc<TerminationReason>>,
    /// The effective grace period in seconds. It may only shrink.
    grace: Option<i64>,
    /// A kill came with a grace period of its own: the termination has a deadline.
    has_deadline: bool,
    /// The same UID was requested again: it is started again once finished.
    restart_requested: bool,
    /// Cancelled when no process of the pod runs.
    awaiting_stop: Vec<CancellationToken>,
    /// Cancelled when nothing is left to do for the pod.
    waiting: Vec<CancellationToken>,
}

/// The phase of a pod, with its data.
#[derive(Clone, Debug)]
enum Lifecycle {
    /// Containers may be started.
    Syncing,
    /// As above, but the worker's next pass is the first one to stop containers.
    TerminationRequested(Termination),
    /// Containers are being stopped.
    Terminating(Termination),
    /// No container runs.
    Terminated(Termination),
    /// Nothing is left to do for this UID.
    Finished { restart_requested: bool },
}

impl Lifecycle {
    fn phase(&self) -> Phase {
        match self {
            Self::Syncing | Self::TerminationRequested(_) => Phase::Syncing,
            Self::Terminating(_) => Phase::Terminating,
            Self::Terminated(_) => Phase::Terminated,
            Self::Finished { .. } => Phase::Finished,
        }
    }

    fn termination(&self) -> Option<&Termination> {
        match self {
            Self::TerminationRequested(termination)
            | Self::Terminating(termination)
            | Self::Terminated(termination) => Some(termination),
            Self::Syncing | Self::Finished { .. } => None,
        }
    }

    fn termination_mut(&mut self) -> Option<&mut Termination> {
        match self {
            Self::TerminationRequested(termination)
            | Self::Terminating(termination)
            | Self::Terminated(termination) => Some(termination),
            Self::Syncing | Self::Finished { .. } => None,
        }
    }

    /// Takes the termination, to move on to another phase with it.
    fn take_termination(&mut self) -> Termination {
        self.termination_mut().map(std::mem::take).unwrap_or_default()
    }
}

/// What the worker has to do.
#[derive(Clone, Debug, Default)]
struct Work {
    /// A pass is requested.
    requested: bool,
    /// A pass is requested by [`Request::Sync`] alone.
    sync_requested: bool,
    /// The pod was updated since the last pass began.
    updated: bool,
}

/// One pod UID's state.
#[derive(Clone, Debug)]
pub struct PodState {
    /// The identity, also of pods without a spec.
    pub pod_ref: PodRef,
    /// The newest desired pod; `None` for one that only the runtime has.
    pub pod: Option<Pod>,
    content: u64,
    lifecycle: Lifecycle,
    work: Work,
    /// The worker may act, or the runtime has the pod; static pods wait here for another UID of the same name.
    started: bool,
}

impl PodState {
    /// The state of a UID before its first request.
    pub fn new(pod_ref: PodRef) -> Self {
        let (lifecycle, work) = (Lifecycle::Syncing, Work::default());
        Self { pod_ref, pod: None, content: 0, lifecycle, work, started: false }
    }

    /// A pod whose API phase is terminal and of which nothing runs: only the clean-up is left.
    pub fn already_terminated(pod_ref: PodRef, pod: Pod) -> Self {
        Self {
            pod_ref,
            pod: Some(pod),
            content: 0,
            lifecycle: Lifecycle::Terminated(Termination::default()),
            work: Work { requested: true, ..Work::default() },
            started: true,
        }
    }

    /// Takes a request.
    pub fn request(&mut self, request: Request) -> Reaction {
        if let Lifecycle::Finished { restart_requested } = &mut self.lifecycle {
            *restart_requested |= matches!(request, Request::Create(_));
            if let Request::Kill(options) = request {
                options.ended();
            }
            return Reaction::default();
        }
        if matches!(request, Request::Create(_))
            && let Some(termination) = self.lifecycle.termination_mut()
        {
            termination.restart_requested = true;
            // A delayed teardown is no longer delayed.
            return Reaction { wake: true, cancel: false };
        }
        let is_sync = matches!(request, Request::Sync);
        let Some(kill) = self.accept(request) else { return Reaction::default() };
        let cancel = self.terminate(kill);
        if is_sync && !cancel {
            self.work.sync_requested = true;
        } else {
            self.work.requested = true;
        }
        Reaction { wake: true, cancel }
    }

    /// Stores the pod of the request; returns its kill options, or `None` if it is to be ignored.
    fn accept(&mut self, request: Request) -> Option<Kill> {
        self.work.updated |= matches!(request, Request::Update(_));
        match request {
            Request::Create(pod) | Request::Update(pod) => {
                self.pod = Some(pod);
                self.content += 1;
            }
            Request::Sync => {}
            Request::Kill(options) => return Some(Kill { requested: true, options, runtime_only: false }),
            Request::KillRuntimeOnly => {
                if self.phase() >= Phase::Terminated {
                    return None;
                }
                self.started = true;
                return Some(Kill { requested: true, runtime_only: self.pod.is_none(), ..Kill::default() });
            }
        }
        Some(Kill::default())
    }

    /// Begins the termination if it is due, and applies the options of the kill to it. Returns true if what the worker is
    /// doing is out of date.
    fn terminate(&mut self, kill: Kill) -> bool {
        let mut cancel = false;
        let KillOptions { grace, evicted, termination_reason: reason, stopped, finished } = kill.options;
        if self.lifecycle.termination().is_none() {
            let deleted = kill.runtime_only || self.deletion_requested();
            if !deleted && !kill.requested && !self.pod.as_ref().is_some_and(|pod| is_terminal(pod)) {
                return false;
            }
            let termination = Termination { deleted, evicted, ..Termination::default() };
            self.lifecycle = Lifecycle::TerminationRequested(termination);
            cancel = true;
        }
        let (terminated, pod) = (self.phase() >= Phase::Terminated, self.pod.as_ref());
        let Some(termination) = self.lifecycle.termination_mut() else { return cancel };
        termination.waiting.extend(finished);
        if terminated {
            stopped.iter().for_each(CancellationToken::cancel);
            return cancel;
        }
        termination.awaiting_stop.extend(stopped);
        // A deletion has no reason of its own. The first reason stays, and so does the end of a pod that has ended by itself.
        if cancel || termination.deleted {
            termination.reason = termination.reason.take().or(reason);
        }
        cancel |= termination.shorten_grace(pod, grace);
        cancel |= grace.is_some() && !std::mem::replace(&mut termination.has_deadline, true);
        cancel
    }

    fn deletion_requested(&self) -> bool {
        self.pod.as_ref().is_some_and(|pod| pod.metadata.deletion_timestamp.is_some())
    }

    /// Stores a pod that differs in its API status alone. The status takes effect with the next request.
    pub fn refresh(&mut self, pod: Pod) {
        if self.phase() != Phase::Finished {
            self.pod = self.pod.take().map(|_| pod);
        }
    }

    /// Which content the pod has, as a count: spec, allocated resources, labels and annotations. An update of its API status
    /// alone, as after the agent's own patch, does not count.
    pub fn content(&self) -> u64 {
        self.content
    }

    /// Takes the pending work, if there is any: the phase whose pass is due.
    pub fn take_work(&mut self) -> Option<Phase> {
        self.work.requested |= std::mem::take(&mut self.work.sync_requested);
        self.take_request()
    }

    /// As [`Self::take_work`], but leaves [`Request::Sync`] pending.
    pub fn take_request(&mut self) -> Option<Phase> {
        if !std::mem::take(&mut self.work.requested) {
            return None;
        }
        if let Lifecycle::TerminationRequested(termination) = &mut self.lifecycle {
            self.lifecycle = Lifecycle::Terminating(std::mem::take(termination));
        }
        Some(self.phase())
    }

    /// The pod was updated since the last call.
    pub fn take_update(&mut self) -> bool {
        std::mem::take(&mut self.work.updated)
    }

    /// How containers are stopped.
    pub fn termination_options(&self) -> TerminationOptions {
        let termination = self.lifecycle.termination();
        TerminationOptions {
            grace: termination.and_then(|termination| termination.grace),
            immediately: termination.is_some_and(|termination| termination.has_deadline),
        }
    }

    /// A static pod whose termination is requested before it was allowed to start is finished.
    pub fn finish_unstarted(&mut self) {
        self.enter_finished();
    }

    fn enter_finished(&mut self) {
        let Termination { restart_requested, awaiting_stop, waiting, .. } = self.lifecycle.take_termination();
        self.lifecycle = Lifecycle::Finished { restart_requested };
        self.work.requested = false;
        awaiting_stop.iter().chain(&waiting).for_each(CancellationToken::cancel);
    }

    /// The worker may act from now on.
    pub fn start(&mut self) {
        self.started = true;
    }

    /// A sync found that the pod has terminated on its own.
    pub fn sync_was_terminal(&mut self) {
        if self.phase() == Phase::Syncing {
            self.lifecycle = Lifecycle::Terminating(self.lifecycle.take_termination());
        }
        self.work.requested = true;
    }

    /// All containers are stopped.
    pub fn terminating_done(&mut self) {
        if self.pod.is_none() {
            self.enter_finished();
        } else {
            let mut termination = self.lifecycle.take_termination();
            let awaiting_stop = std::mem::take(&mut termination.awaiting_stop);
            self.lifecycle = Lifecycle::Terminated(termination);
            self.work.requested = true;
            awaiting_stop.iter().for_each(CancellationToken::cancel);
        }
    }

    /// Everything is released.
    pub fn terminated_done(&mut self) {
        self.enter_finished();
    }

    /// Why the agent terminates the pod, if it does.
    pub fn termination_reason(&self) -> Option<Arc<TerminationReason>> {
        self.lifecycle.termination().and_then(|termination| termination.reason.clone())
    }

    /// No source desires this UID any more (housekeeping). Returns a reaction like a request.
    pub fn orphaned(&mut self) -> Reaction {
        if self.phase() == Phase::Finished {
            return Reaction::default();
        }
        let cancel = self.lifecycle.termination().is_none();
        if cancel {
            self.lifecycle = Lifecycle::TerminationRequested(Termination::default());
        }
        if let Some(termination) = self.lifecycle.termination_mut() {
            termination.deleted = true;
            termination.shorten_grace(self.pod.as_ref(), None);
        }
        self.work.requested = true;
        Reaction { wake: true, cancel }
    }

    /// The name of the pod's phase. A pod whose termination was requested is syncing until the worker takes the request.
    pub fn phase(&self) -> Phase {
        self.lifecycle.phase()
    }

    /// True from the first request to terminate it.
    pub fn termination_requested(&self) -> bool {
        !matches!(self.lifecycle, Lifecycle::Syncing)
    }

    /// True if it has been allowed to start, or the runtime has the pod.
    pub fn was_started(&self) -> bool {
        self.started
    }

    /// The same UID was requested again after its termination: it is started again once finished.
    pub fn restart_requested(&self) -> bool {
        match &self.lifecycle {
            Lifecycle::Finished { restart_requested } => *restart_requested,
            lifecycle => lifecycle.termination().is_some_and(|termination| termination.restart_requested),
        }
    }

    /// Logs, exited containers and sandboxes may be removed.
    pub fn content_may_be_removed(&self) -> bool {
        let terminated = self.phase() >= Phase::Terminated;
        self.lifecycle
            .termination()
            .is_some_and(|termination| termination.evicted || (termination.deleted && terminated))
    }
}

impl Termination {
    /// Applies a requested grace period, the deletion's and the spec's. Returns true if it was set before and changed.
    fn shorten_grace(&mut self, pod: Option<&Pod>, requested: Option<i64>) -> bool {
        let before = self.grace;
        let of_spec = pod.and_then(|pod| pod.spec.as_ref()).and_then(|spec| spec.termination_grace_period_seconds);
        let of_deletion = pod.and_then(|pod| pod.metadata.deletion_grace_period_seconds);
        let shorter = |current: Option<i64>, new: Option<i64>| match (current, new) {
            (Some(current), Some(new)) if new < current => Some(new),
            (None, new) => new,
            (current, _) => current,
        };
        let grace = shorter(shorter(before, of_deletion), requested).or(of_spec);
        self.grace = grace.map(|seconds| seconds.max(1));
        before.is_some() && before != self.grace
    }
}

/// The kill that a request asks for; without `requested` the pod itself decides.
#[derive(Default)]
struct Kill {
    requested: bool,
    options: KillOptions,
    runtime_only: bool,
}

/// API phase Failed or Succeeded.
pub fn is_terminal(pod: &k8s_openapi::api::core::v1::Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Failed" | "Succeeded"))
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
