//! How often this process has written limits of cgroups: what was read of limits stays valid while the count is the same.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

/// Counts writes of limits of any cgroup. Cheap to clone; all clones share the count.
#[derive(Clone, Debug, Default)]
pub struct LimitWrites(Arc<AtomicU64>);

impl LimitWrites {
    /// The number of writes so far. To be taken before files are read: limits that are written meanwhile raise it afterwards.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Counts a write that has ended.
    pub(super) fn add(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}
