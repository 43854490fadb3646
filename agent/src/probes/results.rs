//! The published results of all pods, and which pods have changed since they were last read.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use indexmap::IndexSet;
use tokio::sync::Notify;

use crate::model::ContainerId;
use crate::model::PodUid;
use crate::model::ProbeKind;
use crate::model::ProbeResult;
use crate::model::ProbeResults;

/// Probe results of all pods. Clones share them; no lock is held across an await.
#[derive(Clone, Debug, Default)]
pub struct ProbeResultStore {
    results: Arc<Mutex<Results>>,
    wake: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Results {
    pods: HashMap<PodUid, ProbeResults>,
    changed: IndexSet<PodUid>,
}

impl ProbeResultStore {
    /// Publishes the result of a probe. A change wakes the pod's worker and updates the pod's status.
    pub fn set(&self, pod: &PodUid, container: &ContainerId, kind: ProbeKind, result: ProbeResult) {
        let mut results = self.lock();
        let known = results.pods.entry(pod.clone()).or_default().of_kind_mut(kind);
        if known.insert(container.clone(), result) != Some(result) {
            results.changed.insert(pod.clone());
            drop(results);
            self.wake.notify_one();
        }
    }

    /// Removes the results of containers that no longer exist.
    pub fn retain_containers(&self, pod: &PodUid, exists: impl Fn(&ContainerId) -> bool) {
        if let Some(results) = self.lock().pods.get_mut(pod) {
            for kind in [ProbeKind::Liveness, ProbeKind::Readiness, ProbeKind::Startup] {
                results.of_kind_mut(kind).retain(|container, _| exists(container));
            }
        }
    }

    /// Removes the results of a finished pod.
    pub fn remove_pod(&self, pod: &PodUid) {
        let mut results = self.lock();
        results.pods.remove(pod);
        results.changed.shift_remove(pod);
    }

    /// The results of a pod's containers.
    pub fn of_pod(&self, pod: &PodUid) -> ProbeResults {
        self.lock().pods.get(pod).cloned().unwrap_or_default()
    }

    /// Waits for pods whose results have changed and takes them, in the order of their first change. Cancel-safe. For one
    /// reader.
    pub async fn changed_pods(&self) -> Vec<PodUid> {
        loop {
            let changed = std::mem::take(&mut self.lock().changed);
            if !changed.is_empty() {
                return changed.into_iter().collect();
            }
            self.wake.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Results> {
        // Maps are changed one entry at a time: a panic elsewhere leaves them usable.
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn only_a_change_wakes_the_reader() {
        let (store, [a, b]) = (ProbeResultStore::default(), ["a", "b"].map(PodUid::from));
        let container = ContainerId::from("c");
        let set = |pod, result| store.set(pod, &container, ProbeKind::Readiness, result);
        assert_eq!(store.changed_pods().now_or_never(), None);
        set(&b, ProbeResult::Success);
        set(&a, ProbeResult::Success);
        set(&b, ProbeResult::Failure);
        assert_eq!(store.changed_pods().now_or_never(), Some(vec![b.clone(), a.clone()]));
        set(&b, ProbeResult::Failure);
        assert_eq!(store.changed_pods().now_or_never(), None);
        assert!(!store.of_pod(&b).permits(ProbeKind::Readiness, &container));
        assert!(store.of_pod(&b).permits(ProbeKind::Liveness, &container), "it has no result");
    }

    #[test]
    fn results_end_with_their_container_and_their_pod() {
        let (store, pod) = (ProbeResultStore::default(), PodUid::from("p"));
        let [first, second] = ["1", "2"].map(ContainerId::from);
        store.set(&pod, &first, ProbeKind::Startup, ProbeResult::Success);
        store.set(&pod, &second, ProbeKind::Startup, ProbeResult::Unknown);
        store.retain_containers(&pod, |id| *id != first);
        assert_eq!(store.of_pod(&pod).startup.len(), 1);
        store.remove_pod(&pod);
        assert_eq!(store.of_pod(&pod), ProbeResults::default());
        assert_eq!(store.changed_pods().now_or_never(), None);
    }
}
