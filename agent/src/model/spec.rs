//! Reading a pod's spec: its container lists, their restart policies and what makes a container a sidecar. Only
//! accessors; an absent spec reads as an empty one.

use std::collections::BTreeMap;
use std::collections::HashMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EphemeralContainer;
use k8s_openapi::api::core::v1::Pod;

use super::ContainerClass;

/// From this priority on a pod is critical (`SystemCriticalPriority`).
pub const CRITICAL_PRIORITY: i32 = 2_000_000_000;

/// One entry of `spec.initContainers` or `spec.containers`.
#[derive(Clone, Copy, Debug)]
pub struct SpecContainer<'a> {
    /// Which list, and whether an init container is a sidecar.
    pub class: ContainerClass,
    /// Position in that list.
    pub index: usize,
    /// The entry.
    pub spec: &'a Container,
}

impl<'a> SpecContainer<'a> {
    fn init((index, spec): (usize, &'a Container)) -> Self {
        let class = if is_sidecar(spec) { ContainerClass::Sidecar } else { ContainerClass::Init };
        Self { class, index, spec }
    }

    fn regular((index, spec): (usize, &'a Container)) -> Self {
        Self { class: ContainerClass::Regular, index, spec }
    }

    /// The container's name.
    pub fn name(&self) -> &'a str {
        &self.spec.name
    }
}

/// True if the pod's processes have user ids of their own (KEP-127): `hostUsers: false`.
pub fn has_user_namespace(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.host_users == Some(false))
}

/// Annotations with the AppArmor profile of a container, from before there was a field (KEP-24); its name follows.
pub const APP_ARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// `spec.containers`.
pub fn regular_containers(pod: &Pod) -> &[Container] {
    pod.spec.as_ref().map_or(&[], |spec| &spec.containers)
}

/// `spec.initContainers`, sidecars among them.
pub fn init_containers(pod: &Pod) -> &[Container] {
    pod.spec.as_ref().and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default()
}

/// `spec.ephemeralContainers`.
pub fn ephemeral_containers(pod: &Pod) -> &[EphemeralContainer] {
    pod.spec.as_ref().and_then(|spec| spec.ephemeral_containers.as_deref()).unwrap_or_default()
}

/// `spec.initContainers`, classified, in spec order.
pub fn classified_init(pod: &Pod) -> impl DoubleEndedIterator<Item = SpecContainer<'_>> {
    init_containers(pod).iter().enumerate().map(SpecContainer::init)
}

/// `spec.containers`, in spec order.
pub fn classified_regular(pod: &Pod) -> impl DoubleEndedIterator<Item = SpecContainer<'_>> {
    regular_containers(pod).iter().enumerate().map(SpecContainer::regular)
}

/// Init containers and sidecars, then regular containers: everything a restart policy applies to.
pub fn lasting_containers(pod: &Pod) -> impl Iterator<Item = SpecContainer<'_>> {
    classified_init(pod).chain(classified_regular(pod))
}

/// Indexes [`lasting_containers`] by name; of several with one name the first. Callers with many look-ups use it instead of a
/// linear search.
pub fn lasting_by_name(pod: &Pod) -> HashMap<&str, SpecContainer<'_>> {
    let mut found = HashMap::new();
    for container in lasting_containers(pod) {
        found.entry(container.name()).or_insert(container);
    }
    found
}

/// True for an entry of `spec.initContainers` that is to run as long as the pod (KEP-753). Meaningless for regular
/// containers.
pub fn is_sidecar(init: &Container) -> bool {
    init.restart_policy.as_deref() == Some("Always")
}

/// `spec.runtimeClassName`; `None` for the runtime's default.
pub fn runtime_class(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref().and_then(|spec| spec.runtime_class_name.as_deref()).filter(|name| !name.is_empty())
}

/// `spec.hostNetwork`.
pub fn host_network(pod: &Pod) -> bool {
    pod.spec.as_ref().and_then(|spec| spec.host_network).unwrap_or(false)
}

/// Processes may outlive the first one of their container: `spec.hostPID` or `spec.shareProcessNamespace`.
pub fn shares_pid_namespace(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    spec.is_some_and(|spec| spec.host_pid == Some(true) || spec.share_process_namespace == Some(true))
}

/// A deletion was requested (`metadata.deletionTimestamp`).
pub fn deletion_requested(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// A pod that came from a file or URL (annotation `kubernetes.io/config.source`).
pub fn is_static(pod: &Pod) -> bool {
    pod.metadata.annotations.as_ref().is_some_and(are_static)
}

/// These annotations are of a static pod, or of a sandbox of one: sandboxes have those of their pod.
pub fn are_static(annotations: &BTreeMap<String, String>) -> bool {
    annotations.get("kubernetes.io/config.source").is_some_and(|source| source != "api")
}

/// A pod that the node needs, which is neither evicted nor rejected under pressure: static, a mirror pod, or of a priority
/// reserved for the system (upstream's `IsCriticalPod`).
pub fn is_critical(pod: &Pod) -> bool {
    let is_mirror =
        pod.metadata.annotations.as_ref().is_some_and(|all| all.contains_key("kubernetes.io/config.mirror"));
    let priority = pod.spec.as_ref().and_then(|spec| spec.priority);
    is_static(pod) || is_mirror || priority.is_some_and(|priority| priority >= CRITICAL_PRIORITY)
}

/// The absolute form of a path: from `/`, without `.`, `..` and empty parts. The API admits others inside of containers.
pub fn absolute_path(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(kept.pop()),
            other => kept.push(other),
        }
    }
    format!("/{}", kept.join("/"))
}

/// The dot-separated form of a sysctl's name. `net/ipv4/conf/eth0.1/x` means `net.ipv4.conf.eth0/1.x`: where the first
/// separator is a slash, dots and slashes swap. Admission and the sandbox's configuration have to agree on it.
pub fn dotted_sysctl(name: &str) -> String {
    match name.find(['.', '/']) {
        Some(first) if name.as_bytes()[first] == b'/' => {
            let swapped = |c| match c {
                '/' => '.',
                '.' => '/',
                other => other,
            };
            name.chars().map(swapped).collect()
        }
        _ => name.to_owned(),
    }
}
