//! Finds the desired pod of a request, its running container and its sandbox.

use k8s_openapi::api::core::v1::Container;
use keblet_proto::cri::v1 as cri;

use super::super::containers::Containers;
use super::refusal::Refusal;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::pod_ref;
use crate::model::quote::go_quoted;
use crate::model::runtime_keys;
use crate::model::spec;

/// `name_namespace`, as errors name a pod.
pub(super) fn full_name(pod: &PodRef) -> String {
    format!("{}_{}", pod.name, pod.namespace)
}

impl Containers {
    /// The desired pod.
    ///
    /// # Errors
    /// There is no such pod.
    pub(super) fn desired(&self, namespace: &str, name: &str) -> Result<Pod, Refusal> {
        self.pods.pod(namespace, name).ok_or_else(|| Refusal::not_found("pod does not exist"))
    }

    /// Id of the running container of this name, listed from the runtime, since the cache may lag.
    ///
    /// # Errors
    /// The runtime cannot list containers.
    pub(super) async fn running(&self, pod: &Pod, name: &str) -> Result<Option<String>, Refusal> {
        let filter = cri::ContainerFilter {
            label_selector: [(runtime_keys::POD_UID, pod_ref(pod).uid.as_str()), (runtime_keys::CONTAINER_NAME, name)]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            state: Some(cri::ContainerStateValue { state: cri::ContainerState::ContainerRunning as i32 }),
            ..Default::default()
        };
        let found = self.runtime.list_containers(filter).await?;
        Ok(found.into_iter().max_by_key(|container| container.created_at).map(|container| container.id))
    }

    /// Id of the pod's newest sandbox, one that is ready before others.
    ///
    /// # Errors
    /// The pod has no ready sandbox, or the runtime cannot list sandboxes.
    pub(super) async fn sandbox(&self, pod: &Pod) -> Result<String, Refusal> {
        let pod = pod_ref(pod);
        let filter = cri::PodSandboxFilter {
            label_selector: [(runtime_keys::POD_UID.to_owned(), pod.uid.as_str().to_owned())].into(),
            ..Default::default()
        };
        let found = self.runtime.list_pod_sandboxes(filter).await?;
        let ready = found.into_iter().filter(|sandbox| sandbox.state() == cri::PodSandboxState::SandboxReady);
        let newest = ready.max_by_key(|sandbox| sandbox.created_at);
        let missing = || Refusal::internal(format!("pod not found ({})", go_quoted(&full_name(&pod))));
        newest.map(|sandbox| sandbox.id).ok_or_else(missing)
    }
}

/// Whether the container has a terminal (`tty`); `None` if the spec has no such container.
pub(super) fn terminal(pod: &Pod, name: &str) -> Option<bool> {
    let of = |container: &Container| container.tty.unwrap_or(false);
    let lasting = spec::lasting_containers(pod).find(|container| container.name() == name);
    let ephemeral = || spec::ephemeral_containers(pod).iter().find(|container| container.name == name);
    lasting.map(|container| of(container.spec)).or_else(|| ephemeral().map(|found| found.tty.unwrap_or(false)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing;

    #[test]
    fn a_container_of_any_kind_may_have_a_terminal() {
        let with_terminals = |tty: Option<bool>| {
            let mut pod = testing::with_ephemeral(testing::pod("Always", &["init", "side"], &["main"]), "debug");
            let spec = pod.spec.as_mut().unwrap();
            let init = spec.init_containers.iter_mut().flatten();
            init.chain(&mut spec.containers).for_each(|container| container.tty = tty);
            spec.ephemeral_containers.iter_mut().flatten().for_each(|container| container.tty = tty);
            pod
        };
        for (tty, expected) in [(Some(true), true), (Some(false), false), (None, false)] {
            let pod = std::sync::Arc::new(with_terminals(tty));
            for name in ["init", "side", "main", "debug"] {
                assert_eq!(terminal(&pod, name), Some(expected), "{name} {tty:?}");
            }
            assert_eq!(terminal(&pod, "other"), None);
        }
    }
}
