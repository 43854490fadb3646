//! What has changed within the windows of a policy. Plain data, and the differences that it is made of. Pure.

use std::time::Duration;

use super::sample::NodeSample;
use super::sample::PodSample;
use crate::cgroups::memory_high::High;
use crate::model::PodUid;

/// What is known when a policy is decided on.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Evidence {
    /// The part of the short window in which tasks waited, 0 to 1.
    pub short: f64,
    /// Of the long window.
    pub long: f64,
    /// Pages looked at within the short window because the machine ran short of memory.
    pub scanned: u64,
    /// Bytes read again within the short window after they had been evicted.
    pub refaulted: u64,
    /// How often the limit of all pods was reached within the short window.
    pub limit_hits: u64,
    /// Bytes of memory that the machine has left.
    pub available: Option<u64>,
    /// The pods.
    pub pods: Vec<PodEvidence>,
}

/// A pod; counters as they grew within the long window, as far as it was observed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PodEvidence {
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
    /// Growth of the working set in bytes.
    pub grown: u64,
    /// Bytes that it has read again after they had been evicted.
    pub refaulted: u64,
    /// The part of the time in which some of its tasks waited for memory or, where that is not known, reclaimed it.
    pub waited: f64,
    /// How often `memory.high` has throttled it.
    pub high_hits: u64,
    /// How often it has reached a memory limit of its own.
    pub max_hits: u64,
    /// The part of the time for which its CPU quota has throttled it; above 1 on several processors.
    pub throttled: f64,
    /// Where `memory.high` is set in it.
    pub highs: Vec<High>,
}

impl Evidence {
    /// The node reclaims memory: because the machine is short of it, or because all pods together have reached their limit.
    /// Otherwise tasks wait because of a limit of their own cgroup, and evicting others would not help.
    pub fn node_reclaims(&self) -> bool {
        self.scanned > 0 || self.limit_hits > 0
    }

    /// Adds what has grown on the node between two samples. Counters that go backwards have not grown.
    pub(super) fn add_growth(&mut self, before: &NodeSample, now: &NodeSample) {
        self.scanned = now.scanned.saturating_sub(before.scanned);
        self.refaulted = now.refaulted.saturating_sub(before.refaulted);
        let hits = now.limit_hits.zip(before.limit_hits);
        self.limit_hits = hits.map_or(0, |(now, before)| now.saturating_sub(before));
        self.available = now.available;
    }
}

impl PodEvidence {
    /// Between two samples of a pod, `passed` after each other.
    pub(super) fn between(before: &PodSample, now: &PodSample, passed: Duration) -> Self {
        let share = |time: Duration| if passed.is_zero() { 0.0 } else { time.as_secs_f64() / passed.as_secs_f64() };
        let grown =
            |now: Option<Duration>, before: Option<Duration>| Some(now?.saturating_sub(before.unwrap_or_default()));
        let waited = grown(now.waited, before.waited).or_else(|| grown(now.reclaimed, before.reclaimed));
        Self {
            uid: now.uid.clone(),
            name: now.name.clone(),
            critical: now.critical,
            priority: now.priority,
            requested: now.requested,
            working_set: now.working_set,
            grown: now.working_set.saturating_sub(before.working_set),
            refaulted: now.refaulted.saturating_sub(before.refaulted),
            waited: share(waited.unwrap_or_default()).min(1.0),
            high_hits: now.high_hits.saturating_sub(before.high_hits),
            max_hits: now.max_hits.saturating_sub(before.max_hits),
            throttled: share(now.throttled.saturating_sub(before.throttled)),
            highs: now.highs.clone(),
        }
    }

    /// It uses more memory than it requests.
    pub(super) fn is_above_request(&self) -> bool {
        self.working_set > self.requested
    }

    /// Bytes that the others lack because of this pod: what it holds above its request, and what it took meanwhile.
    pub fn takes(&self) -> u64 {
        let held = self.working_set.saturating_sub(self.requested);
        held.saturating_add(self.grown).saturating_add(self.refaulted)
    }
}
