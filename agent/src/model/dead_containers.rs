//! How many dead containers are kept, and for how long at least.

use std::time::Duration;

/// Limits on dead containers, with the meaning of the kubelet's deprecated flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadContainerPolicy {
    /// Dead instances of each container (`--maximum-dead-containers-per-container`); `None`: no limit, except that one stays
    /// when another exits.
    pub per_container: Option<usize>,
    /// Dead containers of the node (`--maximum-dead-containers`); `None`: no limit.
    pub total: Option<usize>,
    /// Instances created more recently do not count for the limits, and stay (`--minimum-container-ttl-duration`).
    pub min_age: Duration,
}

impl Default for DeadContainerPolicy {
    fn default() -> Self {
        Self { per_container: Some(1), total: None, min_age: Duration::ZERO }
    }
}

impl DeadContainerPolicy {
    /// Dead instances of a container that stay when another one exits, whatever their age.
    pub fn kept_after_exit(&self) -> usize {
        self.per_container.unwrap_or(1).max(1)
    }

    /// True if the workers cannot keep the limits by themselves: one is on all pods, or none is kept of pods whose worker
    /// has finished.
    pub fn concerns_all_pods(&self) -> bool {
        self.total.is_some() || self.per_container == Some(0)
    }

    /// When an instance created at this time is old enough, both in nanoseconds since the Unix epoch. Without a least age it
    /// always is, whatever the clock says.
    pub fn old_at(&self, created_at: i64) -> i64 {
        if self.min_age.is_zero() {
            return i64::MIN;
        }
        created_at.saturating_add(i64::try_from(self.min_age.as_nanos()).unwrap_or(i64::MAX))
    }
}
