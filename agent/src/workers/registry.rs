//! The worker registry: the mailbox of each pod worker by pod UID. Only [`super::pod_workers::PodWorkers`] inserts and
//! removes; others read summaries and wake workers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use super::mailbox::Mailbox;
use super::state::Phase;
use super::state::Request;
use crate::model::Pod;
use crate::model::PodUid;

/// All mailboxes. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct WorkerRegistry(Arc<Mutex<HashMap<PodUid, Arc<Mailbox>>>>);

/// The state of one pod worker at one moment.
#[derive(Clone, Debug)]
pub struct WorkerSummary {
    /// The worker's phase.
    pub phase: Phase,
    /// Termination was requested.
    pub terminating: bool,
    /// The newest desired pod; `None` for one that only the runtime knows.
    pub pod: Option<Pod>,
}

impl WorkerRegistry {
    /// Locks the map for one lookup or change. Lock order: registry before mailbox state.
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<Mailbox>>> {
        // Changed one insertion or removal at a time: a panic elsewhere leaves it usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pod's worker has something to do; nothing happens without one.
    pub fn poke(&self, uid: &PodUid) {
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
