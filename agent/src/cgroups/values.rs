//! Values written to a cgroup. Plain data.

use std::collections::BTreeMap;

/// A limit that large means none, in every file of both versions.
pub const UNLIMITED: u64 = 1 << 62;

/// Values of one cgroup. What is absent is left as it is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CgroupValues {
    /// `cpu.shares`; converted to `cpu.weight` for v2. 0 counts as absent.
    pub cpu_shares: u64,
    /// Quota (-1 for none) and period, microseconds.
    pub cpu_max: Option<(i64, u64)>,
    /// Hard limit, bytes; 0 counts as absent.
    pub memory_max: Option<u64>,
    /// `memory.min` (v2): bytes that are never reclaimed.
    pub memory_min: Option<u64>,
    /// `memory.low` (v2): bytes that are reclaimed only if nothing else can be.
    pub memory_low: Option<u64>,
    /// `memory.high` (v2): bytes above which processes are throttled.
    pub memory_high: Option<u64>,
    /// Limit of processes; 0 is written as 1, negative means none.
    pub pids: Option<i64>,
    /// Bytes by page size, for every page size of the node.
    pub hugepages: BTreeMap<u64, u64>,
    /// CPUs as a list, such as `0-3,8`.
    pub cpus: Option<String>,
}

impl CgroupValues {
    /// Nothing is to be written.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}
