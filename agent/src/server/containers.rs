//! Pods and containers as the handlers of logs, streams and commands see them. The handlers change nothing themselves:
//! the call to the runtime (streams, a command, a checkpoint) is the one that the client requested.

use std::sync::Arc;

use k8s_openapi::api::core::v1::PodStatus;

use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::spec;
use crate::runtime::Runtime;

/// Finds pods and what is known of them. No method may block.
pub trait PodLookup: Send + Sync + 'static {
    /// The desired pod of this namespace and name; mirror pods are not among them.
    fn pod(&self, namespace: &str, name: &str) -> Option<Pod>;

    /// The pod's status: the one that the agent has computed, else that of the pod's source.
    fn status(&self, pod: &Pod) -> PodStatus;

    /// The cached snapshot of a pod.
    fn snapshot(&self, uid: &PodUid) -> Option<Arc<PodSnapshot>>;
}

/// Access to pods and their containers. Cheap to clone.
#[derive(Clone)]
pub struct Containers {
    /// Pods.
    pub pods: Arc<dyn PodLookup>,
    /// The container runtime.
    pub runtime: Runtime,
}

/// True if the pod's spec has a container of this name, in any of its lists.
pub(super) fn has_container(pod: &Pod, name: &str) -> bool {
    spec::lasting_containers(pod).any(|container| container.name() == name)
        || spec::ephemeral_containers(pod).iter().any(|container| container.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing;

    #[test]
    fn containers_of_any_kind_are_found() {
        let pod = testing::pod("Always", &["init", "side"], &["main"]);
        let pod = Arc::new(testing::with_ephemeral(pod, "debug"));
        let names = ["init", "side", "main", "debug", "other"];
        assert_eq!(names.map(|name| has_container(&pod, name)), [true, true, true, true, false]);
    }
}
