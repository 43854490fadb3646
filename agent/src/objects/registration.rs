//! A pod's key on its objects, and the count by which it learns that they changed.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use tokio::sync::watch;

use crate::model::PodUid;

/// Counts the changes of all objects that one key is about.
pub(super) type Changed = watch::Sender<u64>;

/// Tells claims apart: a pod may be claimed for anew before its old key is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct RegistrationId(u64);

/// One pod's key on its objects. Dropping it lets them go.
pub struct Registration {
    pub(super) id: RegistrationId,
    pub(super) uid: PodUid,
    pub(super) counter: Changed,
    pub(super) release: Option<Box<dyn FnOnce() + Send + Sync>>,
    changes: watch::Receiver<u64>,
}

impl Registration {
    /// A key on nothing yet.
    pub fn new(uid: PodUid) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (counter, changes) = watch::channel(0);
        Self { id: RegistrationId(NEXT.fetch_add(1, Relaxed)), uid, counter, release: None, changes }
    }

    /// How often what the pod refers to has changed since it was first claimed.
    pub fn generation(&self) -> u64 {
        *self.changes.borrow()
    }

    /// Waits for the next change that this has not waited for. Nothing is lost when the wait is cancelled.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            // Cannot be: the counter lives as long as this.
            std::future::pending().await
        }
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration")
            .field("uid", &self.uid)
            .field("generation", &self.generation())
            .finish_non_exhaustive()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release();
        }
    }
}
