//! The mailboxes of all workers, where they can be counted. Only the sync loop's [`super::pod_workers::PodWorkers`] adds
//! and removes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use super::mailbox::Mailbox;
use super::state::Phase;
use crate::model::Pod;
use crate::model::PodUid;

/// All mailboxes. Cheap to clone; all clones are one.
#[derive(Clone, Debug, Default)]
pub struct Roster(Arc<Mutex<HashMap<PodUid, Arc<Mailbox>>>>);

/// A pod with a worker, as it is at the moment.
#[derive(Clone, Debug)]
pub struct Working {
    /// Where it is in its life.
    pub phase: Phase,
    /// It is ending, or to be ended.
    pub ending: bool,
    /// As desired last; `None` for one that only the runtime knows.
    pub pod: Option<Pod>,
}

impl Roster {
    /// Held for one look or change; a mailbox's state may be locked below it, never above.
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<Mailbox>>> {
        // Changed one insertion or removal at a time: a panic elsewhere leaves it usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every pod that has, or had, a worker and is not forgotten.
    pub fn all(&self) -> HashMap<PodUid, Working> {
        let seen = |(uid, mailbox): (&PodUid, &Arc<Mailbox>)| {
            let state = mailbox.state();
            let working =
                Working { phase: state.phase(), ending: state.termination_requested(), pod: state.pod.clone() };
            (uid.clone(), working)
        };
        self.lock().iter().map(seen).collect()
    }
}
