//! Pods that the newest relist has found and that are not in the cache yet. Until they are, what they have on the node
//! must not be removed as leftovers.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use tokio::sync::Notify;

use crate::model::PodUid;

/// The pods that are still to be inspected. Written by the PLEG task. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct Uninspected {
    state: Arc<Mutex<State>>,
    wake: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    /// The newest relist has succeeded.
    listed: bool,
    pods: HashSet<PodUid>,
}

impl Uninspected {
    /// A relist has found these pods, which the cache does not have.
    pub(super) fn found(&self, pods: HashSet<PodUid>) {
        let mut state = self.state();
        let resolved = !state.listed || state.pods.iter().any(|uid| !pods.contains(uid));
        *state = State { listed: true, pods };
        drop(state);
        if resolved {
            self.wake.notify_one();
        }
    }

    /// A relist has failed.
    pub(super) fn unknown(&self) {
        self.state().listed = false;
    }

    /// The pod is in the cache.
    pub(super) fn inspected(&self, uid: &PodUid) {
        let mut state = self.state();
        if state.pods.remove(uid) && state.pods.is_empty() {
            self.wake.notify_one();
        }
    }

    /// True if the pod was found and is not in the cache.
    pub(super) fn contains(&self, uid: &PodUid) -> bool {
        self.state().pods.contains(uid)
    }

    /// The pods; `None` if the newest relist has failed, and before the first one.
    pub(super) fn pods(&self) -> Option<HashSet<PodUid>> {
        let state = self.state();
        state.listed.then(|| state.pods.clone())
    }

    /// Waits until the runtime has listed its pods, or all that were left are inspected or gone. For one reader.
    /// Cancel-safe.
    pub(super) async fn resolved(&self) {
        self.wake.notified().await;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn uids(names: &[&str]) -> HashSet<PodUid> {
        names.iter().map(|name| PodUid::from(*name)).collect()
    }

    #[test]
    fn pods_are_unknown_until_a_relist_and_after_one_that_failed() {
        let uninspected = Uninspected::default();
        assert_eq!(uninspected.pods(), None);
        uninspected.found(uids(&["a"]));
        assert_eq!(uninspected.pods(), Some(uids(&["a"])));
        uninspected.unknown();
        assert_eq!(uninspected.pods(), None);
        assert!(uninspected.contains(&PodUid::from("a")));
    }

    #[test]
    fn the_reader_is_woken_when_there_is_less_to_spare() {
        let uninspected = Uninspected::default();
        let woken = || uninspected.resolved().now_or_never().is_some();
        assert!(!woken());
        uninspected.found(uids(&["a", "b"]));
        assert!(woken(), "first relist");
        uninspected.inspected(&PodUid::from("a"));
        assert!(!woken(), "another one is left");
        uninspected.inspected(&PodUid::from("b"));
        assert!(woken(), "all are inspected");
        uninspected.found(uids(&["c", "d"]));
        assert!(!woken(), "more than before");
        uninspected.found(uids(&["c"]));
        assert!(woken(), "one is gone");
        uninspected.unknown();
        assert!(!woken());
        uninspected.found(uids(&["c"]));
        assert!(woken(), "known again");
    }
}
