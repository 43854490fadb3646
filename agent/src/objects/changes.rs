//! Who is to be told when an object changes.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use crate::model::PodUid;

/// Counts the changes of all objects one pod refers to.
pub(super) type Changed = watch::Sender<u64>;

/// One pod's claim on its objects. Dropping it lets them go.
pub struct Interest {
    pub(super) uid: PodUid,
    pub(super) changes: Option<watch::Receiver<u64>>,
    pub(super) release: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl Interest {
    /// A claim on nothing yet.
    pub fn new(uid: PodUid) -> Self {
        Self { uid, changes: None, release: None }
    }

    /// How often what the pod refers to has changed since it was registered.
    pub fn generation(&self) -> u64 {
        self.changes.as_ref().map_or(0, |changes| *changes.borrow())
    }

    /// Waits for the next change that this has not waited for; for ever if the pod is not registered. Nothing is lost
    /// when the wait is cancelled.
    pub async fn changed(&mut self) {
        if let Some(changes) = &mut self.changes
            && changes.changed().await.is_ok()
        {
            return;
        }
        std::future::pending().await
    }
}

impl std::fmt::Debug for Interest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Interest").field("uid", &self.uid).field("generation", &self.generation()).finish()
    }
}

impl Drop for Interest {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            release();
        }
    }
}

/// The counters of all registered pods.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pods: Mutex<HashMap<PodUid, Changed>>,
}

impl Changes {
    fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Changed>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pod's counter, made if it has none; `interest` listens to it.
    pub(super) fn of(&self, pod: &Pod, interest: &mut Interest) -> Changed {
        debug_assert_eq!(pod.metadata.uid.as_deref().unwrap_or_default(), interest.uid.as_str());
        let counter = self.lock().entry(interest.uid.clone()).or_default().clone();
        if interest.changes.is_none() {
            interest.changes = Some(counter.subscribe());
        }
        counter
    }

    pub(super) fn forget(&self, uid: &PodUid) {
        self.lock().remove(uid);
    }

    pub(super) fn registered(&self) -> Vec<PodUid> {
        self.lock().keys().cloned().collect()
    }
}
