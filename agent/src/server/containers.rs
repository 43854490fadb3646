//! What the handlers of pods and containers read and call. They change nothing themselves: what they ask of the runtime
//! (streams, a command, a checkpoint) is what the client asked for.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PodStatus;

use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::spec;
use crate::runtime::Runtime;

/// Finds a pod by namespace and name.
pub type FindPod = dyn Fn(&str, &str) -> Option<Pod> + Send + Sync;
/// Finds the cached snapshot of a pod.
pub type FindSnapshot = dyn Fn(&PodUid) -> Option<Arc<PodSnapshot>> + Send + Sync;

/// Handles on pods, made by whoever wires the servers. Cheap to clone; none of the closures may block.
#[derive(Clone)]
pub struct Containers {
    /// The desired pod of this namespace and name; mirror pods are not among them.
    pub pod: Arc<FindPod>,
    /// What is said of the pod: the agent's own word, else that of the pod's source.
    pub status: Arc<dyn Fn(&Pod) -> PodStatus + Send + Sync>,
    /// The cached snapshot of a pod.
    pub snapshot: Arc<FindSnapshot>,
    /// The container runtime.
    pub runtime: Runtime,
}

/// True if the pod's spec has a container of this name, in any of its lists.
pub(super) fn has_container(pod: &Pod, name: &str) -> bool {
    spec::lasting_containers(pod).any(|container| container.name() == name)
        || spec::ephemeral_containers(pod).iter().any(|container| container.name == name)
}
