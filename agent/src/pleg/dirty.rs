//! The set of changed pods, from the PLEG to the sync loop. Bounded by the number of pods: a pod with many events is in it
//! once, since their content is in the cache.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use indexmap::IndexSet;
use tokio::sync::Notify;

use crate::model::PodUid;

/// A set of changed pods. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct DirtyPods {
    pods: Arc<Mutex<IndexSet<PodUid>>>,
    wake: Arc<Notify>,
}

impl DirtyPods {
    /// Adds a pod and wakes the reader.
    pub fn mark(&self, uid: PodUid) {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner).insert(uid);
        self.wake.notify_one();
    }

    /// Waits until there is at least one pod and takes them all, in the order of their first change. Cancel-safe.
    pub async fn take(&self) -> Vec<PodUid> {
        loop {
            let pods = std::mem::take(&mut *self.pods.lock().unwrap_or_else(PoisonError::into_inner));
            if !pods.is_empty() {
                return pods.into_iter().collect();
            }
            self.wake.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changes_of_one_pod_coalesce_in_order() {
        let dirty = DirtyPods::default();
        for uid in ["b", "a", "b"] {
            dirty.mark(PodUid::from(uid));
        }
        assert_eq!(dirty.take().await, [PodUid::from("b"), PodUid::from("a")]);
    }
}
