//! Pods whose cgroups this process has limited. A cgroup of an earlier agent may lack its values, since that agent may have
//! ended between creating and limiting it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

/// UIDs of such pods. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct LimitedPods(Arc<Mutex<HashSet<String>>>);

impl LimitedPods {
    fn all(&self) -> MutexGuard<'_, HashSet<String>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn contains(&self, uid: &str) -> bool {
        self.all().contains(uid)
    }

    pub(super) fn add(&self, uid: &str) {
        self.all().insert(uid.to_owned());
    }

    pub(super) fn remove(&self, uid: &str) {
        self.all().remove(uid);
    }
}
