//! One view of regular, init and ephemeral containers. Pure.

use std::borrow::Cow;
use std::collections::HashMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EphemeralContainer;
use k8s_openapi::api::core::v1::Pod;

use crate::model::ContainerClass;
use crate::model::StartContainer;
use crate::model::spec;
use crate::model::spec::SpecContainer;

/// A container of the pod spec: regular, init or ephemeral.
#[derive(Clone, Debug)]
pub struct ContainerSpec<'a> {
    /// Its list and kind.
    pub class: ContainerClass,
    /// The definition; ephemeral containers are converted.
    pub container: Cow<'a, Container>,
    /// `targetContainerName` of an ephemeral container.
    pub target: Option<&'a str>,
}

impl<'a> ContainerSpec<'a> {
    /// The container a planned start is about; `None` if the spec has no such entry.
    pub fn of_start(pod: &'a Pod, start: &StartContainer) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let found = match start.class {
            ContainerClass::Regular => Self::plain(start.class, spec.containers.get(start.index)?),
            ContainerClass::Init | ContainerClass::Sidecar => {
                Self::plain(start.class, spec.init_containers.as_ref()?.get(start.index)?)
            }
            ContainerClass::Ephemeral => Self::ephemeral(spec.ephemeral_containers.as_ref()?.get(start.index)?),
        };
        (found.container.name == start.name).then_some(found)
    }

    /// The container of this name. Callers with many look-ups use [`ContainerSpecs`] instead.
    pub fn named(pod: &'a Pod, name: &str) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let is_sidecar = |c: &Container| c.restart_policy.as_deref() == Some("Always");
        let init = spec.init_containers.iter().flatten().map(|container| {
            let class = if is_sidecar(container) { ContainerClass::Sidecar } else { ContainerClass::Init };
            Self::plain(class, container)
        });
        let regular = spec.containers.iter().map(|container| Self::plain(ContainerClass::Regular, container));
        init.chain(regular).find(|found| found.container.name == name).or_else(|| {
            spec.ephemeral_containers.iter().flatten().find(|container| container.name == name).map(Self::ephemeral)
        })
    }

    /// `spec.containers{name}` and the like, for events.
    pub fn field_path(&self) -> String {
        let list = match self.class {
            ContainerClass::Regular => "containers",
            ContainerClass::Init | ContainerClass::Sidecar => "initContainers",
            ContainerClass::Ephemeral => "ephemeralContainers",
        };
        format!("spec.{list}{{{}}}", self.container.name)
    }

    fn plain(class: ContainerClass, container: &'a Container) -> Self {
        Self { class, container: Cow::Borrowed(container), target: None }
    }

    fn ephemeral(container: &'a EphemeralContainer) -> Self {
        Self {
            class: ContainerClass::Ephemeral,
            container: Cow::Owned(as_container(container.clone())),
            target: container.target_container_name.as_deref().filter(|name| !name.is_empty()),
        }
    }
}

/// The containers of a pod spec by name; of several with one name the one that [`ContainerSpec::named`] finds.
#[derive(Debug)]
pub struct ContainerSpecs<'a> {
    lasting: HashMap<&'a str, SpecContainer<'a>>,
    ephemeral: HashMap<&'a str, &'a EphemeralContainer>,
}

impl<'a> ContainerSpecs<'a> {
    /// Indexes the containers of this pod.
    pub fn of(pod: &'a Pod) -> Self {
        let ephemeral = spec::ephemeral_containers(pod).iter().rev();
        let ephemeral = ephemeral.map(|container| (container.name.as_str(), container)).collect();
        Self { lasting: spec::lasting_by_name(pod), ephemeral }
    }

    /// The container of this name.
    pub fn named(&self, name: &str) -> Option<ContainerSpec<'a>> {
        let lasting = self.lasting.get(name).map(|found| ContainerSpec::plain(found.class, found.spec));
        lasting.or_else(|| self.ephemeral.get(name).copied().map(ContainerSpec::ephemeral))
    }

    /// True if there is a container of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.lasting.contains_key(name) || self.ephemeral.contains_key(name)
    }
}

fn as_container(from: EphemeralContainer) -> Container {
    Container {
        args: from.args,
        command: from.command,
        env: from.env,
        env_from: from.env_from,
        image: from.image,
        image_pull_policy: from.image_pull_policy,
        lifecycle: from.lifecycle,
        liveness_probe: from.liveness_probe,
        name: from.name,
        ports: from.ports,
        readiness_probe: from.readiness_probe,
        resize_policy: from.resize_policy,
        resources: from.resources,
        restart_policy: from.restart_policy,
        restart_policy_rules: from.restart_policy_rules,
        security_context: from.security_context,
        startup_probe: from.startup_probe,
        stdin: from.stdin,
        stdin_once: from.stdin_once,
        termination_message_path: from.termination_message_path,
        termination_message_policy: from.termination_message_policy,
        tty: from.tty,
        volume_devices: from.volume_devices,
        volume_mounts: from.volume_mounts,
        working_dir: from.working_dir,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing;

    /// Containers: as many as an object of the API server has room for.
    #[test]
    fn thousands_of_containers_are_found_by_name() {
        let names: Vec<String> = (0..20_000).map(|number| format!("c{number}")).collect();
        let regular: Vec<&str> = names.iter().map(String::as_str).collect();
        let pod = testing::pod("Always", &["side", "c1"], &regular);
        let pod = testing::with_ephemeral(testing::with_ephemeral(pod, "c0"), "debug");
        let specs = ContainerSpecs::of(&pod);
        assert!(names.iter().all(|name| specs.contains(name)) && specs.contains("debug") && !specs.contains("none"));
        assert!(names.iter().all(|name| specs.named(name).is_some_and(|found| found.container.name == *name)));
        for name in ["side", "c1", "c0", "c2", "debug", "none"] {
            let (found, expected) = (specs.named(name), ContainerSpec::named(&pod, name));
            let parts = |spec: &ContainerSpec<'_>| (spec.class, spec.container.clone().into_owned());
            assert_eq!(found.as_ref().map(parts), expected.as_ref().map(parts), "{name}");
        }
    }
}
