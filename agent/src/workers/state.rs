//! The state machine of one pod UID: syncing → terminating → terminated → finished. Pure; time is an argument.
//!
//! Requests come from the sync loop, completions from the worker. Both go through here, so that what a worker does
//! next follows from this value alone. Rules: upstream's `UpdatePod` and its completions.

use std::sync::Arc;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::model::Pod;
use crate::model::PodRef;
use crate::status::TerminationReason;
use crate::workers::act::StopTerms;

/// Where a pod is in its life.
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

/// What the sync loop wants.
#[derive(Clone, Debug)]
pub enum Request {
    /// The pod is new to the agent.
    Create(Pod),
    /// Its spec, metadata or API status changed.
    Update(Pod),
    /// Look at it again.
    Sync,
    /// Terminate it.
    Kill(KillOptions),
    /// Terminate a pod that only the runtime knows.
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
    /// Cancelled when nothing is left to do for the pod.
    pub finished: Option<CancellationToken>,
}

/// What a request leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reaction {
    /// The worker has something to do.
    pub wake: bool,
    /// What the worker is doing is out of date: it may stop waiting.
    pub cancel: bool,
}

/// One pod UID's state.
#[derive(Clone, Debug)]
pub struct PodState {
    /// The identity, also of pods without a spec.
    pub pod_ref: PodRef,
    /// The newest desired pod; `None` for one that only the runtime knows.
    pub pod: Option<Pod>,
    phase: Phase,
    /// Set from the first request to terminate the pod, even before the worker has seen it.
    terminating_at: Option<Instant>,
    /// The worker has begun to stop containers: none may be started from here on.
    started_terminating: bool,
    /// The worker may act; static pods wait here for another UID of the same name.
    started: bool,
    deleted: bool,
    evicted: bool,
    restart_requested: bool,
    observed_runtime: bool,
    grace: Option<i64>,
    pending: bool,
    /// Work is pending because of [`Request::Sync`] alone.
    poked: bool,
    updated: bool,
    termination_reason: Option<Arc<TerminationReason>>,
    /// A kill came with a grace period of its own: the termination has a deadline.
    has_deadline: bool,
    waiting: Vec<CancellationToken>,
}

impl PodState {
    /// The state of a UID before its first request.
    pub fn new(pod_ref: PodRef) -> Self {
        Self {
            pod_ref,
            pod: None,
            phase: Phase::Syncing,
            terminating_at: None,
            started_terminating: false,
            started: false,
            deleted: false,
            evicted: false,
            restart_requested: false,
            observed_runtime: false,
            grace: None,
            pending: false,
            poked: false,
            updated: false,
            termination_reason: None,
            has_deadline: false,
            waiting: Vec::new(),
        }
    }

    /// A pod whose API phase is terminal and of which nothing runs: only the clean-up is left.
    pub fn already_terminated(pod_ref: PodRef, pod: Pod, now: Instant) -> Self {
        let mut state = Self::new(pod_ref);
        state.pod = Some(pod);
        state.phase = Phase::Terminated;
        state.terminating_at = Some(now);
        state.started_terminating = true;
        state.started = true;
        state.pending = true;
        state
    }

    /// Takes a request.
    pub fn request(&mut self, request: Request, now: Instant) -> Reaction {
        if self.phase == Phase::Finished {
            self.restart_requested |= matches!(request, Request::Create(_));
            if let Request::Kill(KillOptions { finished: Some(finished), .. }) = request {
                finished.cancel();
            }
            return Reaction::default();
        }
        if self.terminating_at.is_some() && matches!(request, Request::Create(_)) {
            self.restart_requested = true;
            // A delayed teardown is no longer delayed.
            return Reaction { wake: true, cancel: false };
        }
        let is_poke = matches!(request, Request::Sync);
        let kill = self.accept(request);
        let Some(kill) = kill else { return Reaction::default() };
        let mut reaction = Reaction { wake: true, cancel: false };
        if self.terminating_at.is_none() && self.must_terminate(&kill) {
            self.terminating_at = Some(now);
            self.evicted |= kill.evicted;
            reaction.cancel = true;
        }
        if self.terminating_at.is_some() && self.phase < Phase::Terminated {
            reaction.cancel |= self.shorten_grace(kill.grace);
            reaction.cancel |= kill.grace.is_some() && !std::mem::replace(&mut self.has_deadline, true);
        }
        if is_poke && !reaction.cancel {
            self.poked = true;
        } else {
            self.pending = true;
        }
        reaction
    }

    /// Stores what the request brings; returns its kill options, or `None` if it is to be ignored.
    fn accept(&mut self, request: Request) -> Option<Kill> {
        let mut kill = Kill::default();
        self.updated |= matches!(request, Request::Update(_));
        match request {
            Request::Create(pod) | Request::Update(pod) => self.pod = Some(pod),
            Request::Sync => {}
            Request::Kill(options) => {
                self.waiting.extend(options.finished);
                if self.terminating_at.is_none() {
                    self.termination_reason = options.termination_reason;
                }
                kill = Kill { asked: true, evicted: options.evicted, grace: options.grace, runtime_only: false };
            }
            Request::KillRuntimeOnly => {
                if self.phase >= Phase::Terminated {
                    return None;
                }
                self.observed_runtime = true;
                kill = Kill { asked: true, runtime_only: self.pod.is_none(), ..Kill::default() };
            }
        }
        Some(kill)
    }

    /// Stores a pod that differs in its API status alone. The status takes effect with the next request.
    pub fn refresh(&mut self, pod: Pod) {
        if self.phase != Phase::Finished {
            self.pod = self.pod.take().map(|_| pod);
        }
    }

    fn must_terminate(&mut self, kill: &Kill) -> bool {
        let meta = self.pod.as_ref().map(|pod| &pod.metadata);
        if kill.runtime_only || meta.is_some_and(|m| m.deletion_timestamp.is_some()) {
            self.deleted = true;
            return true;
        }
        kill.asked || self.pod.as_ref().is_some_and(|pod| is_terminal(pod))
    }

    /// The effective grace period may only shrink. Returns true if it was set before and changed.
    fn shorten_grace(&mut self, asked: Option<i64>) -> bool {
        let before = self.grace;
        let spec = self.pod.as_ref().and_then(|p| p.spec.as_ref()).and_then(|s| s.termination_grace_period_seconds);
        let deletion = self.pod.as_ref().and_then(|p| p.metadata.deletion_grace_period_seconds);
        let shorter = |current: Option<i64>, new: Option<i64>| match (current, new) {
            (Some(current), Some(new)) if new < current => Some(new),
            (None, new) => new,
            (current, _) => current,
        };
        let grace = shorter(shorter(before, deletion), asked).or(spec);
        self.grace = grace.map(|seconds| seconds.max(1));
        before.is_some() && before != self.grace
    }

    /// Takes the pending work, if there is any: what the worker should do now.
    pub fn take_work(&mut self) -> Option<Phase> {
        self.pending |= std::mem::take(&mut self.poked);
        self.take_request()
    }

    /// As [`Self::take_work`], but leaves [`Request::Sync`] pending.
    pub fn take_request(&mut self) -> Option<Phase> {
        if !std::mem::take(&mut self.pending) {
            return None;
        }
        if self.phase == Phase::Syncing && self.terminating_at.is_some() {
            self.phase = Phase::Terminating;
        }
        Some(self.phase)
    }

    /// The pod was updated since this was last asked.
    pub fn take_update(&mut self) -> bool {
        std::mem::take(&mut self.updated)
    }

    /// Work was taken but cannot be done now; it stays due.
    pub fn put_back(&mut self) {
        self.pending = true;
    }

    /// The worker begins to stop containers. Returns the terms of the stop.
    pub fn begin_terminating(&mut self) -> StopTerms {
        self.started_terminating = true;
        StopTerms { grace: self.grace, immediately: self.has_deadline }
    }

    /// A static pod whose termination is requested before it was allowed to start is finished.
    pub fn finish_unstarted(&mut self) {
        self.mark_finished();
    }

    fn mark_finished(&mut self) {
        self.phase = Phase::Finished;
        self.pending = false;
        self.waiting.drain(..).for_each(|finished| finished.cancel());
    }

    /// The worker may act from now on.
    pub fn start(&mut self) {
        self.started = true;
    }

    /// A sync found that the pod has terminated on its own.
    pub fn sync_was_terminal(&mut self, now: Instant) {
        self.terminating_at.get_or_insert(now);
        self.phase = self.phase.max(Phase::Terminating);
        self.started_terminating = true;
        self.pending = true;
    }

    /// All containers are stopped.
    pub fn terminating_done(&mut self) {
        if self.pod.is_none() {
            self.mark_finished();
        } else {
            self.phase = Phase::Terminated;
            self.pending = true;
        }
    }

    /// Everything is released.
    pub fn terminated_done(&mut self) {
        self.mark_finished();
    }

    /// Why the agent terminates the pod, if it does.
    pub fn termination_reason(&self) -> Option<Arc<TerminationReason>> {
        self.termination_reason.clone()
    }

    /// No source desires this UID any more (housekeeping). Returns a reaction like a request.
    pub fn orphaned(&mut self, now: Instant) -> Reaction {
        self.deleted = true;
        if self.phase == Phase::Finished {
            return Reaction::default();
        }
        let cancel = self.terminating_at.is_none();
        self.terminating_at.get_or_insert(now);
        self.shorten_grace(None);
        self.pending = true;
        Reaction { wake: true, cancel }
    }

    /// Where the pod is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// True from the first request to terminate it.
    pub fn termination_requested(&self) -> bool {
        self.terminating_at.is_some()
    }

    /// The worker has begun to stop containers.
    pub fn started_terminating(&self) -> bool {
        self.started_terminating
    }

    /// True if it has been allowed to start, or the runtime knows it.
    pub fn was_started(&self) -> bool {
        self.started || self.observed_runtime
    }

    /// The same UID was requested again after its termination: it is started again once finished.
    pub fn restart_requested(&self) -> bool {
        self.restart_requested
    }

    /// Something waits until nothing is left to do for the pod.
    pub fn is_awaited(&self) -> bool {
        self.restart_requested || !self.waiting.is_empty()
    }

    /// Logs, exited containers and sandboxes may be removed.
    pub fn content_may_be_removed(&self) -> bool {
        self.evicted || (self.deleted && self.phase >= Phase::Terminated)
    }
}

#[derive(Default)]
struct Kill {
    asked: bool,
    evicted: bool,
    runtime_only: bool,
    grace: Option<i64>,
}

/// API phase Failed or Succeeded.
pub fn is_terminal(pod: &k8s_openapi::api::core::v1::Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Failed" | "Succeeded"))
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
