//! What the node does not offer at all or at the moment: pod-level resources with their feature gate off, features that
//! it does not declare, new pods while the machine shuts down. Pure.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceRequirements;

use super::Decision;
use super::Input;
use crate::model::spec;

/// `spec.resources` (KEP-2837) needs its feature gate.
pub(super) fn pod_level_resources(input: Input<'_>) -> Decision {
    let wanted = input.pod.spec.as_ref().is_some_and(|spec| spec.resources.is_some());
    if wanted && !input.node.pod_level_resources {
        return Decision::reject("PodLevelResourcesNotSupported", "PodLevelResources feature gate is disabled");
    }
    Decision::Admit
}

/// A pod requires the feature.
type Requires = fn(&Pod) -> bool;

/// Features that a pod requires of its node (KEP-5328), with what requires them.
const REQUIRED: [(&str, Requires); 2] = [
    ("RestartAllContainersOnContainerExits", restarts_all_containers),
    ("UserNamespacesHostNetworkSupport", has_user_namespace_on_host_network),
];

/// The node declares what the pod requires.
pub(super) fn declared(input: Input<'_>) -> Decision {
    let Some(declared) = &input.node.declared_features else { return Decision::Admit };
    let missing = REQUIRED.iter().filter(|(feature, requires)| !declared.contains(*feature) && requires(input.pod));
    match unavailable(missing.map(|(feature, _)| *feature)) {
        Some(message) => Decision::reject("PodFeatureUnsupported", message),
        None => Decision::Admit,
    }
}

/// An update of a pod, from the first to the second, requires the feature.
type UpdateRequires = fn(&Pod, &Pod) -> bool;

/// Features that an update of a pod requires of its node, with what requires them.
const REQUIRED_BY_UPDATE: [(&str, UpdateRequires); 2] = [
    ("InPlacePodLevelResourcesVerticalScaling", resizes_pod),
    ("InPlacePodVerticalScalingInitContainers", resizes_init_container),
];

/// The message about an update of a pod that requires features that its node does not declare; `None` if it requires none.
/// `declared` is as in [`NodeOffer`](super::NodeOffer).
pub fn missing_for_update(declared: Option<&BTreeSet<String>>, before: &Pod, after: &Pod) -> Option<String> {
    let declared = declared?;
    let required = REQUIRED_BY_UPDATE.iter().filter(|(_, requires)| requires(before, after));
    unavailable(required.map(|(feature, _)| *feature).filter(|feature| !declared.contains(*feature)))
}

/// Names the missing features, if there are any.
fn unavailable<'a>(missing: impl Iterator<Item = &'a str>) -> Option<String> {
    let missing: Vec<&str> = missing.collect();
    let names = || format!("Pod requires node features that are not available: {}", missing.join(", "));
    (!missing.is_empty()).then(names)
}

fn resizes_pod(before: &Pod, after: &Pod) -> bool {
    resources(before) != resources(after)
}

fn resources(pod: &Pod) -> Option<&ResourceRequirements> {
    pod.spec.as_ref().and_then(|spec| spec.resources.as_ref())
}

/// Of init containers that are no sidecars.
fn resizes_init_container(before: &Pod, after: &Pod) -> bool {
    let mut pairs = spec::init_containers(before).iter().zip(spec::init_containers(after));
    pairs.any(|(before, after)| !spec::is_sidecar(before) && before.resources != after.resources)
}

/// A restart rule with the action `RestartAllContainers` (KEP-5532).
fn restarts_all_containers(pod: &Pod) -> bool {
    let containers = spec::init_containers(pod).iter().chain(spec::regular_containers(pod));
    let mut rules = containers.flat_map(|container| container.restart_policy_rules.iter().flatten());
    rules.any(|rule| rule.action == "RestartAllContainers")
}

fn has_user_namespace_on_host_network(pod: &Pod) -> bool {
    spec::host_network(pod) && spec::has_user_namespace(pod)
}

/// Graceful node shutdown (KEP-2000) admits no pods. One that already runs terminates with the others.
pub(super) fn shutdown(input: Input<'_>) -> Decision {
    if input.node.shutting_down && !input.is_resumed {
        return Decision::reject("NodeShutdown", "Pod was rejected as the node is shutting down.");
    }
    Decision::Admit
}
