//! The desired pods where servers can read them. Only the sync loop writes.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use tokio::time::Instant;

use super::pods::Pods;
use crate::model::Pod;
use crate::model::PodUid;

/// Desired pods and the sync loop's pulse. Cheap to clone; locks are held for a look only.
#[derive(Clone, Debug, Default)]
pub struct SharedPods {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    pods: Pods,
    last_turn: Option<Instant>,
}

impl SharedPods {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Maps are changed one insertion at a time: a panic elsewhere leaves them usable.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, pod: Pod) {
        self.lock().pods.set(pod);
    }

    pub(super) fn remove(&self, pod: &Pod) {
        self.lock().pods.remove(pod);
    }

    /// The sync loop has come round.
    pub(super) fn turn(&self) {
        self.lock().last_turn = Some(Instant::now());
    }

    /// The pod with this UID; mirror pods are not among them.
    pub fn by_uid(&self, uid: &PodUid) -> Option<Pod> {
        self.lock().pods.by_uid(uid).cloned()
    }

    /// All pods, without mirror pods, in no order.
    pub fn all(&self) -> Vec<Pod> {
        self.lock().pods.all().cloned().collect()
    }

    /// When the sync loop last had something to do or took its pulse; `None` before it has started.
    pub fn last_turn(&self) -> Option<Instant> {
        self.lock().last_turn
    }
}
