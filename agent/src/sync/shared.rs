//! Desired pods, shared with the servers. Only the sync loop writes.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::Instant;

use super::pods::Pods;
use crate::model::Pod;
use crate::model::PodUid;
use crate::status::ApiCopies;

/// How long manifests that cannot be read are waited for. A kubelet does not wait for them.
const UNREADABLE_LIMIT: Duration = Duration::from_secs(600);

/// Desired pods and the time of the sync loop's last iteration. Cheap to clone; no lock is held across an await.
#[derive(Clone, Debug, Default)]
pub struct SharedPods {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    pods: Pods,
    last_iteration: Option<Instant>,
    sources_ready: bool,
    /// Since when only manifests are missing that cannot be read.
    sources_read: Option<Instant>,
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

    /// With these pods, set one after another.
    #[cfg(test)]
    pub(crate) fn holding(pods: impl IntoIterator<Item = Pod>) -> Self {
        let shared = Self::default();
        pods.into_iter().for_each(|pod| shared.set(pod));
        shared
    }

    /// Every source of pods has been read.
    pub(super) fn set_sources_ready(&self) {
        self.lock().sources_ready = true;
    }

    /// Every source of pods has been read, perhaps without manifests of static pods that run.
    pub(super) fn set_sources_read(&self) {
        self.lock().sources_read.get_or_insert_with(Instant::now);
    }

    /// True once every source of pods has been read: no desired pod is missing. True also while the manifest of a static pod
    /// stays unreadable: what concerns all pods does not wait for one of them for ever.
    pub fn sources_ready(&self) -> bool {
        let inner = self.lock();
        inner.sources_ready || inner.sources_read.is_some_and(|read| read.elapsed() >= UNREADABLE_LIMIT)
    }

    /// Called by the sync loop in each iteration.
    pub(super) fn record_iteration(&self) {
        self.lock().last_iteration = Some(Instant::now());
    }

    /// The pod with this UID; mirror pods are not among them.
    pub fn by_uid(&self, uid: &PodUid) -> Option<Pod> {
        self.lock().pods.by_uid(uid).cloned()
    }

    /// All pods, without mirror pods, in no order.
    pub fn all(&self) -> Vec<Pod> {
        self.lock().pods.all().cloned().collect()
    }

    /// All mirror pods, in no order.
    pub fn mirrors(&self) -> Vec<Pod> {
        self.lock().pods.mirrors().cloned().collect()
    }

    /// The pod with this full name (`name_namespace`), and the mirror pod with it.
    pub fn named(&self, full_name: &str) -> (Option<Pod>, Option<Pod>) {
        let inner = self.lock();
        (inner.pods.by_full_name(full_name).cloned(), inner.pods.mirror_named(full_name).cloned())
    }

    /// When the sync loop last began an iteration; `None` before it has started.
    pub fn last_iteration(&self) -> Option<Instant> {
        self.lock().last_iteration
    }
}

impl ApiCopies for SharedPods {
    fn api_copy(&self, uid: &PodUid) -> Option<Pod> {
        self.lock().pods.api_copy(uid).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_manifest_that_stays_unreadable_is_waited_for_for_a_bounded_time() {
        let pods = SharedPods::default();
        tokio::time::sleep(2 * UNREADABLE_LIMIT).await;
        assert!(!pods.sources_ready(), "nothing was read");
        pods.set_sources_read();
        tokio::time::sleep(UNREADABLE_LIMIT / 2).await;
        assert!(!pods.sources_ready());
        pods.set_sources_read();
        tokio::time::sleep(UNREADABLE_LIMIT / 2).await;
        assert!(pods.sources_ready(), "of the first time");
        let complete = SharedPods::default();
        complete.set_sources_ready();
        assert!(complete.sources_ready());
    }
}
