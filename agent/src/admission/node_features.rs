//! What the node does not offer at all or at the moment: pod-level resources with their feature gate off, new pods while
//! the machine shuts down. Pure.

use super::Decision;
use super::Input;

/// `spec.resources` (KEP-2837) needs its feature gate.
pub(super) fn pod_level_resources(input: Input<'_>) -> Decision {
    let wanted = input.pod.spec.as_ref().is_some_and(|spec| spec.resources.is_some());
    if wanted && !input.node.pod_level_resources {
        return Decision::reject("PodLevelResourcesNotSupported", "PodLevelResources feature gate is disabled");
    }
    Decision::Admit
}

/// Graceful node shutdown (KEP-2000) admits no pods.
pub(super) fn shutdown(input: Input<'_>) -> Decision {
    if input.node.shutting_down {
        return Decision::reject("NodeShutdown", "Pod was rejected as the node is shutting down.");
    }
    Decision::Admit
}
