//! Counters of the node and its pods at one moment. Plain data. Counters that the node does not have are absent.

use std::time::Duration;

use tokio::time::Instant;

use crate::cgroups::memory_high::High;
use crate::cgroups::usage::Pressure;
use crate::model::PodUid;

/// The node.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NodeSample {
    /// When it was read.
    pub at: Instant,
    /// Waiting for memory of all tasks; absent without PSI.
    pub node: Option<Pressure>,
    /// Of the tasks of pods; absent with cgroup v1.
    pub kubepods: Option<Pressure>,
    /// Pages that the kernel has looked at because the machine ran short of memory. Does not grow for the limit of a cgroup.
    pub scanned: u64,
    /// Bytes that were read again after they had been evicted, whatever the reason.
    pub refaulted: u64,
    /// How often the limit of all pods (node allocatable) was reached.
    pub limit_hits: Option<u64>,
    /// Bytes of memory that the machine has left, as the eviction signal `memory.available`.
    pub available: Option<u64>,
}

/// A pod.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PodSample {
    /// The pod.
    pub uid: PodUid,
    /// `namespace/name`
    pub name: String,
    /// It is never evicted.
    pub critical: bool,
    /// Its priority.
    pub priority: i32,
    /// Bytes of memory that it requests.
    pub requested: u64,
    /// Its working set in bytes.
    pub working_set: u64,
    /// For how long some of its tasks have waited for memory; absent with cgroup v1.
    pub waited: Option<Duration>,
    /// For how long its tasks have reclaimed memory themselves; absent without probes.
    pub reclaimed: Option<Duration>,
    /// Bytes that it has read again after they had been evicted.
    pub refaulted: u64,
    /// How often `memory.high` has throttled it.
    pub high_hits: u64,
    /// How often it has reached a memory limit of its own.
    pub max_hits: u64,
    /// For how long its CPU quota has throttled it.
    pub throttled: Duration,
    /// Where `memory.high` is set in it.
    pub highs: Vec<High>,
}
