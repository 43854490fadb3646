//! What the node does not offer at all or at the moment: pod-level resources with their feature gate off, features that
//! it does not declare, new pods while the machine shuts down. Pure.

use k8s_openapi::api::core::v1::Pod;

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
    let missing: Vec<&str> = missing.map(|(feature, _)| *feature).collect();
    if missing.is_empty() {
        return Decision::Admit;
    }
    let message = format!("Pod requires node features that are not available: {}", missing.join(", "));
    Decision::reject("PodFeatureUnsupported", message)
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
