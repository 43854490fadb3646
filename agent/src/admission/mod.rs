//! Admission: an ordered list of pure checks that decides once per pod UID whether this node runs a pod.
//!
//! The order is that of the kubelet's admission handlers; the first check that rejects decides. A rejected pod gets
//! phase Failed, the reason and "Pod was rejected: " with the message. Checks read plain values only: the pod and what
//! the node offers. Device, resource and topology checks attach where [`CHECKS`] names their place.

mod app_armor;
mod eviction;
mod node_features;
mod operating_system;
pub mod path_safety;
mod supplemental_groups;
mod sysctls;
mod unsupported;

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

pub use sysctls::SysctlAllowlist;
pub use sysctls::UnknownSysctlNamespace;

use crate::model::PodUid;
use crate::model::Pressures;

/// What a check decides about a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The node runs the pod.
    Admit,
    /// The node does not run the pod.
    Reject(Rejection),
}

/// Why a pod is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// `status.reason` and the reason of the event, as upstream spells it.
    pub reason: &'static str,
    /// Text of the event; `status.message` without its prefix.
    pub message: String,
}

impl Decision {
    fn reject(reason: &'static str, message: impl Into<String>) -> Self {
        Self::Reject(Rejection { reason, message: message.into() })
    }
}

/// What the node offers to pods, as far as checks ask for it.
#[derive(Clone, Debug, Default)]
pub struct NodeOffer {
    /// Sysctls that pods may set.
    pub sysctls: Arc<SysctlAllowlist>,
    /// AppArmor is enabled on the host.
    pub app_armor: bool,
    /// The runtime honours `supplementalGroupsPolicy` (KEP-3619).
    pub supplemental_groups_policy: bool,
    /// Feature gate PodLevelResources (KEP-2837).
    pub pod_level_resources: bool,
    /// The machine shuts down: no new pods.
    pub shutting_down: bool,
    /// Resources under pressure.
    pub pressures: Pressures,
}

/// What a check reads.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The pod to decide on.
    pub pod: &'a Pod,
    /// The pod is of the class BestEffort.
    pub best_effort: bool,
    /// The node.
    pub node: &'a NodeOffer,
}

type Check = fn(Input<'_>) -> Decision;

/// All checks in order. Upstream validates paths in the API server, before any handler; then come its handlers:
/// eviction, sysctls, topology and resource managers, predicates (OS, groups policy, devices, resource fit, node
/// affinity), AppArmor, pod features, node-declared features, shutdown.
const CHECKS: [Check; 9] = [
    path_safety::check,
    eviction::check,
    sysctls::check,
    // Topology, CPU, memory and device managers.
    operating_system::check,
    supplemental_groups::check,
    // Devices, resource fit, node affinity, host ports, taints; preemption for critical pods.
    app_armor::check,
    node_features::pod_level_resources,
    unsupported::check,
    node_features::shutdown,
];

/// Runs all checks on a pod; the first rejection decides. Pure.
pub fn decide(input: Input<'_>) -> Decision {
    let decisions = CHECKS.iter().map(|check| check(input));
    decisions.into_iter().find(|decision| *decision != Decision::Admit).unwrap_or(Decision::Admit)
}

/// The decisions made so far, by pod UID.
#[derive(Debug, Default)]
pub struct Decisions {
    by_uid: HashMap<PodUid, Decision>,
}

impl Decisions {
    /// Why this pod was rejected; `None` if it was admitted or not decided on.
    pub fn rejection(&self, uid: &PodUid) -> Option<&Rejection> {
        match self.by_uid.get(uid)? {
            Decision::Admit => None,
            Decision::Reject(rejection) => Some(rejection),
        }
    }

    /// All rejected pods, in no order.
    pub fn rejected(&self) -> impl Iterator<Item = &PodUid> {
        self.by_uid.iter().filter(|(_, decision)| **decision != Decision::Admit).map(|(uid, _)| uid)
    }

    /// A decision was made on this pod.
    pub fn contains(&self, uid: &PodUid) -> bool {
        self.by_uid.contains_key(uid)
    }

    /// Stores the first decision on a pod; later ones are ignored.
    pub fn store(&mut self, uid: PodUid, decision: Decision) {
        self.by_uid.entry(uid).or_insert(decision);
    }

    /// Drops the decision on a pod that its source removed: the same UID is decided on again when it comes back.
    pub fn remove(&mut self, uid: &PodUid) {
        self.by_uid.remove(uid);
    }
}

#[cfg(test)]
mod tests;
