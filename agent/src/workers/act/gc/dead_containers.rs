//! The limits on dead containers, as the workers share them.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use crate::model::ContainerId;
use crate::model::DeadContainerPolicy;

/// The limits, and the instances that exceed those on all pods.
#[derive(Debug, Default)]
pub struct DeadContainers {
    policy: DeadContainerPolicy,
    excess: Mutex<HashSet<ContainerId>>,
}

impl DeadContainers {
    /// With these limits, and nothing in excess yet.
    pub fn new(policy: DeadContainerPolicy) -> Self {
        Self { policy, excess: Mutex::default() }
    }

    /// The limits.
    pub fn policy(&self) -> DeadContainerPolicy {
        self.policy
    }

    /// From now on these instances are in excess, and no others.
    pub fn set_excess(&self, excess: HashSet<ContainerId>) {
        *self.excess() = excess;
    }

    /// The instances in excess; not to be held across an await.
    pub(super) fn excess(&self) -> MutexGuard<'_, HashSet<ContainerId>> {
        // Replaced as a whole: a panic elsewhere leaves it usable.
        self.excess.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
