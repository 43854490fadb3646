//! Admission: an ordered list of pure checks that decides once per pod UID whether this node runs a pod.
//!
//! The order is that of the kubelet's admission handlers; the first check that rejects decides. A rejected pod gets
//! phase Failed, the reason and "Pod was rejected: " with the message. Checks read plain values only: the pod, what the
//! node offers and what other pods hold of it. Checks of devices and topology attach where [`CHECKS`] names their place.
//!
//! A pod that an earlier agent admitted (it has started) is not checked again for what may have changed since: room, labels,
//! taints, pressure, a shutdown that began.

mod app_armor;
mod eviction;
mod general;
mod host_ports;
mod needs;
mod node_affinity;
mod node_features;
mod node_info;
mod operating_system;
pub mod path_safety;
mod preemption;
mod supplemental_groups;
mod sysctls;
mod taints;
mod unsupported;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

pub use general::Insufficient;
pub use general::NODE_AFFINITY;
pub use host_ports::HostPort;
pub use needs::HeldResources;
pub use needs::Needs;
pub use needs::Quantities;
pub use node_features::missing_for_update;
pub use node_info::NodeInfo;
pub use preemption::Candidate;
pub use preemption::Candidates;
pub use preemption::is_preemptable;
pub use preemption::victims;
pub use sysctls::SysctlAllowlist;
pub use sysctls::UnknownSysctlNamespace;

use crate::model::PodUid;
use crate::model::Pressures;

/// What is decided about a pod.
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
    pub reason: Cow<'static, str>,
    /// Text of the event; `status.message` without its prefix.
    pub message: String,
}

impl Decision {
    fn reject(reason: &'static str, message: impl Into<String>) -> Self {
        Self::Reject(Rejection { reason: Cow::Borrowed(reason), message: message.into() })
    }
}

/// What the checks yield for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmissionResult {
    /// The node runs the pod.
    Admit,
    /// The node runs the pod, which is critical, if other pods are evicted that hold these resources.
    Preempt(Vec<Insufficient>),
    /// The node does not run the pod.
    Reject(Rejection),
}

impl AdmissionResult {
    fn reject(reason: &'static str, message: &str) -> Self {
        Self::Reject(Rejection { reason: Cow::Borrowed(reason), message: message.to_owned() })
    }
}

/// What the node offers to pods, as far as checks read it.
#[derive(Clone, Debug, Default)]
pub struct NodeOffer {
    /// The node as schedulers see it; `None` rejects every pod.
    pub node: Option<Arc<NodeInfo>>,
    /// Features that the node declares (KEP-5328); `None` with the feature gate off.
    pub declared_features: Option<Arc<BTreeSet<String>>>,
    /// Sysctls that pods may set.
    pub sysctls: Arc<SysctlAllowlist>,
    /// AppArmor is enabled on the host.
    pub app_armor: bool,
    /// The runtime honours `supplementalGroupsPolicy` (KEP-3619).
    pub supplemental_groups_policy: bool,
    /// Feature gate PodLevelResources (KEP-2837).
    pub pod_level_resources: bool,
    /// Resources of device plugins of another kubelet: this agent gives no container their devices.
    pub device_resources: Arc<BTreeSet<String>>,
    /// The machine shuts down: no new pods.
    pub shutting_down: bool,
    /// Resources under pressure.
    pub pressures: Pressures,
}

impl NodeOffer {
    /// The offer of a node that has room for any pods.
    pub fn unlimited() -> Self {
        Self { node: Some(Arc::new(NodeInfo::unlimited())), ..Self::default() }
    }
}

/// What a check reads.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The pod to decide on.
    pub pod: &'a Pod,
    /// The pod is of the class BestEffort.
    pub best_effort: bool,
    /// An earlier agent admitted the pod, and it has not ended.
    pub is_resumed: bool,
    /// What the pod needs.
    pub needs: &'a Needs,
    /// What other active pods hold.
    pub held: &'a HeldResources,
    /// The node.
    pub node: &'a NodeOffer,
}

type Check = fn(Input<'_>) -> Decision;

/// Checks in order, before and after those of schedulers ([`general`]). Upstream validates paths in the API server, before
/// any handler; then come its handlers: eviction, sysctls, topology and resource managers, predicates (OS, groups policy,
/// devices, general), AppArmor, pod features, node-declared features, shutdown.
const CHECKS: (&[Check], &[Check]) = (
    &[
        path_safety::check,
        eviction::check,
        sysctls::check,
        // Topology, CPU, memory and device managers.
        operating_system::check,
        supplemental_groups::check,
        // Devices.
    ],
    &[
        app_armor::check,
        node_features::pod_level_resources,
        node_features::declared,
        unsupported::check,
        node_features::shutdown,
    ],
);

/// Runs all checks on a pod; the first rejection decides. Nothing is preempted for a pod that another check rejects. Pure.
pub fn decide(input: Input<'_>) -> AdmissionResult {
    let (before, after) = CHECKS;
    if let Some(rejection) = first_rejection(before, input) {
        return AdmissionResult::Reject(rejection);
    }
    match general::check(input) {
        AdmissionResult::Reject(rejection) => AdmissionResult::Reject(rejection),
        result => first_rejection(after, input).map_or(result, AdmissionResult::Reject),
    }
}

fn first_rejection(checks: &[Check], input: Input<'_>) -> Option<Rejection> {
    checks.iter().find_map(|check| match check(input) {
        Decision::Admit => None,
        Decision::Reject(rejection) => Some(rejection),
    })
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
mod testing;
#[cfg(test)]
mod tests;
