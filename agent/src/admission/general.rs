//! The checks of schedulers, repeated on the node: resources, node affinity, node name, host ports, taints. Pure.
//!
//! A pod that an earlier agent admitted is not checked again: it holds its resources already, and labels, taints and the
//! configuration may have changed since.

use std::borrow::Cow;

use super::AdmissionResult;
use super::Input;
use super::NodeInfo;
use super::Rejection;
use super::host_ports;
use super::needs::CPU;
use super::needs::EPHEMERAL_STORAGE;
use super::needs::MEMORY;
use super::needs::PODS;
use super::needs::Quantities;
use super::node_affinity;
use super::taints;
use crate::model::resources::is_extended;
use crate::model::spec;

/// Reason of pods that may not run on a node with these labels.
pub const NODE_AFFINITY: &str = "NodeAffinity";

/// A resource of which the node has too little left for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Insufficient {
    /// Its name.
    pub resource: String,
    pub(super) requested: i64,
    pub(super) used: i64,
    pub(super) capacity: i64,
}

impl Insufficient {
    /// How much is missing.
    pub(super) fn missing(&self) -> i64 {
        self.requested.saturating_sub(self.capacity.saturating_sub(self.used))
    }

    /// The rejection of a pod that lacks it.
    pub fn rejection(&self) -> Rejection {
        let Self { resource, requested, used, capacity } = self;
        let message = format!(
            "Node didn't have enough resource: {resource}, requested: {requested}, used: {used}, capacity: {capacity}"
        );
        Rejection { reason: Cow::Owned(format!("OutOf{resource}")), message }
    }
}

/// A critical pod that lacks nothing but resources preempts others.
pub(super) fn check(input: Input<'_>) -> AdmissionResult {
    let Some(node) = &input.node.node else {
        return AdmissionResult::reject("InvalidNodeInfo", "Kubelet cannot get node info.");
    };
    if input.is_resumed {
        return AdmissionResult::Admit;
    }
    let missing = insufficient(&input.needs.request, &input.held.requested, &node.allocatable);
    let refused = refused(input, node);
    let is_critical = spec::is_critical(input.pod);
    match (missing.first(), refused) {
        (None, None) => AdmissionResult::Admit,
        (Some(first), _) if !is_critical => AdmissionResult::Reject(first.rejection()),
        (_, Some((reason, message))) => AdmissionResult::reject(reason, message),
        (Some(_), None) => AdmissionResult::Preempt(missing),
    }
}

/// The first requirement beside resources that the node does not meet, with its message.
fn refused(input: Input<'_>, node: &NodeInfo) -> Option<(&'static str, &'static str)> {
    let pod = input.pod;
    let wanted = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
    if !node_affinity::matches(pod, node) {
        return Some((
            NODE_AFFINITY,
            "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector",
        ));
    }
    if !wanted.is_empty() && wanted != node.name {
        return Some(("NodeName", "Predicate NodeName failed: node(s) didn't match the requested node name"));
    }
    if !host_ports::are_free(&input.needs.host_ports, &input.held.host_ports) {
        let message = "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
        return Some(("NodePorts", message));
    }
    if !spec::is_static(pod) && !taints::tolerates_all(pod, &node.taints, "NoExecute") {
        let message = "Predicate TaintToleration failed: node(s) had taints that the pod didn't tolerate";
        return Some(("TaintToleration", message));
    }
    None
}

/// Resources that are missing, in the order in which they are reported. A pod without requests is only counted.
/// Extended resources that the node does not know are those of a cluster or a scheduler.
fn insufficient(request: &Quantities, held: &Quantities, allocatable: &Quantities) -> Vec<Insufficient> {
    let fixed = [PODS, CPU, MEMORY, EPHEMERAL_STORAGE].into_iter();
    let known = |name: &&str| !is_extended(name) || allocatable.scalar.contains_key(*name);
    let names = fixed.chain(request.scalar.keys().map(String::as_str).filter(known));
    let lacks = |resource: &str| {
        let (requested, used, capacity) = (request.get(resource), held.get(resource), allocatable.get(resource));
        let is_short = requested > 0 && requested > capacity.saturating_sub(used);
        is_short.then(|| Insufficient { resource: resource.to_owned(), requested, used, capacity })
    };
    names.filter_map(lacks).collect()
}

#[cfg(test)]
#[path = "general_tests.rs"]
mod tests;
