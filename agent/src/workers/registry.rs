//! The worker registry: the mailbox of each pod worker by pod UID. Only [`super::pod_workers::PodWorkers`] inserts and
//! removes; others read summaries and wake workers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use super::mailbox::Mailbox;
use super::state::KillOptions;
use super::state::Phase;
use super::state::Request;
use crate::model::Pod;
use crate::model::PodUid;

/// All mailboxes. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct WorkerRegistry {
    mailboxes: Arc<Mutex<HashMap<PodUid, Arc<Mailbox>>>>,
    /// Pods that are to be terminated when they are created.
    terminations: Arc<Mutex<HashMap<PodUid, KillOptions>>>,
}

/// The state of one pod worker at one moment.
#[derive(Clone, Debug)]
pub struct WorkerSummary {
    /// The worker's phase.
    pub phase: Phase,
    /// Termination was requested.
    pub terminating: bool,
    /// The newest desired pod; `None` for one that only the runtime has.
    pub pod: Option<Pod>,
}

impl WorkerRegistry {
    /// Locks the map for one lookup or change. Lock order: registry before mailbox state.
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<Mailbox>>> {
        // Changed one insertion or removal at a time: a panic elsewhere leaves it usable.
        self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn terminations(&self) -> MutexGuard<'_, HashMap<PodUid, KillOptions>> {
        self.terminations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the pod terminated when it is created, before a container of it is started. Does not concern a pod that has a
    /// worker, or a static one.
    pub fn terminate_on_creation(&self, uid: PodUid, options: KillOptions) {
        self.terminations().insert(uid, options);
    }

    /// The pod is to be terminated when it is created.
    pub fn is_terminated_on_creation(&self, uid: &PodUid) -> bool {
        self.terminations().contains_key(uid)
    }

    /// Takes [`Self::terminate_on_creation`] back.
    pub fn take_termination(&self, uid: &PodUid) -> Option<KillOptions> {
        self.terminations().remove(uid)
    }

    /// The phase of the pod's worker, also of a finished one; `None` without one.
    pub fn phase(&self, uid: &PodUid) -> Option<Phase> {
        self.lock().get(uid).map(|mailbox| mailbox.state().phase())
    }

    /// The pod's worker has something to do; nothing happens without one.
    pub fn request_sync(&self, uid: &PodUid) {
        if let Some(mailbox) = self.lock().get(uid) {
            let reaction = mailbox.state().request(Request::Sync);
            mailbox.react(reaction);
        }
    }

    /// A summary of every worker, also of finished ones that housekeeping has not removed yet.
    pub fn summaries(&self) -> HashMap<PodUid, WorkerSummary> {
        let summary = |(uid, mailbox): (&PodUid, &Arc<Mailbox>)| {
            let state = mailbox.state();
            let terminating = state.termination_requested();
            (uid.clone(), WorkerSummary { phase: state.phase(), terminating, pod: state.pod.clone() })
        };
        self.lock().iter().map(summary).collect()
    }
}
