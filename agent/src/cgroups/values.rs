//! Values written to a cgroup. Plain data.

use std::collections::BTreeMap;

/// Values of a pod's own cgroup.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PodValues {
    /// `cpu.shares`; converted to `cpu.weight` for v2. 0 leaves the kernel's default.
    pub cpu_shares: u64,
    /// Quota (-1 for none) and period, microseconds; `None` leaves the kernel's default.
    pub cpu_max: Option<(i64, u64)>,
    /// Bytes; `None` or 0 leave the kernel's default.
    pub memory_max: Option<u64>,
    /// `podPidsLimit`; `None` leaves the kernel's default.
    pub pids: Option<i64>,
    /// Bytes by page size, for every page size of the node.
    pub hugepages: BTreeMap<u64, u64>,
}
