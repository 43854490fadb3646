//! Requests and limits of a pod's containers and of the pod itself: what is allocated to them, and what was applied. Pure.

use std::collections::BTreeMap;
use std::collections::HashSet;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::Amount;
use super::ContainerClass;
use super::ContainerResources;
use super::ContainerState;
use super::PodSnapshot;
use super::spec;

/// Smallest CPU limit that a cgroup can express, thousandths of a CPU.
pub const MIN_CPU_LIMIT: i64 = 10;
/// Smallest CPU request that a cgroup can express, thousandths of a CPU.
pub const MIN_CPU_REQUEST: i64 = 2;

/// A resource of devices or of a cluster (`example.com/gpu`): its name has a domain, which is not Kubernetes' own.
pub fn is_extended(name: &str) -> bool {
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

/// Quantities by resource name.
pub type Quantities = BTreeMap<String, Quantity>;

/// Requests and limits of one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodResources {
    /// Of regular and init containers, by name.
    pub containers: BTreeMap<String, ResourceRequirements>,
    /// `spec.resources` (KEP-2837).
    pub pod: Option<ResourceRequirements>,
}

impl PodResources {
    /// What the spec states.
    pub fn of(pod: &Pod) -> Self {
        let stated = |container: &Container| (container.name.clone(), container.resources.clone().unwrap_or_default());
        Self {
            containers: spec::lasting_containers(pod).map(|container| stated(container.spec)).collect(),
            pod: pod.spec.as_ref().and_then(|spec| spec.resources.clone()),
        }
    }

    /// The pod with these resources in place of its own, or `None` if they are equal. Containers without an entry keep
    /// theirs; without `pod_level` so does the pod.
    pub fn put_into(&self, pod: &Pod, pod_level: bool) -> Option<Pod> {
        let stated = Self::of(pod);
        let other = |(name, own): &(&String, &ResourceRequirements)| {
            self.containers.get(*name).is_some_and(|recorded| !are_same(recorded, own))
        };
        let containers_differ = stated.containers.iter().any(|entry| other(&entry));
        let pod_differs = pod_level && !is_same_pod_level(self.pod.as_ref(), stated.pod.as_ref());
        if !containers_differ && !pod_differs {
            return None;
        }
        let mut pod = pod.clone();
        let spec = pod.spec.get_or_insert_default();
        for container in spec.init_containers.iter_mut().flatten().chain(&mut spec.containers) {
            if let Some(recorded) = self.containers.get(&container.name) {
                container.resources = Some(recorded.clone());
            }
        }
        if pod_level {
            spec.resources.clone_from(&self.pod);
        }
        Some(pod)
    }

    /// Keeps of a record of what was applied what is in force: that of containers that run. Another one gets what is
    /// allocated to it when it is started, and an init container that is no sidecar is never resized.
    pub fn retain_running(&mut self, pod: &Pod, snapshot: &PodSnapshot) {
        let lasts = |container: &spec::SpecContainer<'_>| container.class != ContainerClass::Init;
        let lasting: HashSet<&str> =
            spec::lasting_containers(pod).filter(lasts).map(|container| container.name()).collect();
        let newest = snapshot.newest_by_name();
        let is_running = |name: &str| newest.get(name).is_some_and(|of| of.state == ContainerState::Running);
        self.containers.retain(|name, _| lasting.contains(name.as_str()) && is_running(name));
    }
}

/// The same requests, limits and claims, in whatever notation.
pub fn are_same(one: &ResourceRequirements, other: &ResourceRequirements) -> bool {
    let no_claims = |of: &ResourceRequirements| of.claims.clone().unwrap_or_default();
    same_list(one.requests.as_ref(), other.requests.as_ref())
        && same_list(one.limits.as_ref(), other.limits.as_ref())
        && no_claims(one) == no_claims(other)
}

/// The same `spec.resources`; none is not the same as an empty one.
pub fn is_same_pod_level(one: Option<&ResourceRequirements>, other: Option<&ResourceRequirements>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => are_same(one, other),
        (None, None) => true,
        _ => false,
    }
}

fn same_list(one: Option<&Quantities>, other: Option<&Quantities>) -> bool {
    let (nothing, none) = (Quantities::new(), Quantities::new());
    let (one, other) = (one.unwrap_or(&nothing), other.unwrap_or(&none));
    let same = |name: &String, quantity: &Quantity| {
        other.get(name).is_some_and(|other| match (Amount::try_from(quantity), Amount::try_from(other)) {
            (Ok(one), Ok(other)) => one == other,
            _ => quantity == other,
        })
    };
    one.len() == other.len() && one.iter().all(|(name, quantity)| same(name, quantity))
}

/// CPU and memory of a container or pod in the units in which changes are applied; 0 for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compute {
    /// Thousandths of a CPU.
    pub cpu_request: i64,
    /// Thousandths of a CPU.
    pub cpu_limit: i64,
    /// Bytes.
    pub memory_request: i64,
    /// Bytes.
    pub memory_limit: i64,
}

/// A resource that can be resized in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resizable {
    /// CPU.
    Cpu,
    /// Memory.
    Memory,
}

impl Resizable {
    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
        }
    }
}

impl Compute {
    /// Of these requests and limits. A quantity that cannot be read counts as none: such a pod never runs.
    pub fn of(resources: &ResourceRequirements) -> Self {
        let read = |list: Option<&Quantities>, name: &str, value: fn(Amount) -> i64| {
            let quantity = list.and_then(|list| list.get(name));
            quantity.and_then(|quantity| Amount::try_from(quantity).ok()).map_or(0, value)
        };
        let (requests, limits) = (resources.requests.as_ref(), resources.limits.as_ref());
        Self {
            cpu_request: read(requests, "cpu", Amount::milli_value),
            cpu_limit: read(limits, "cpu", Amount::milli_value),
            memory_request: read(requests, "memory", Amount::value),
            memory_limit: read(limits, "memory", Amount::value),
        }
    }

    /// Request and limit of one resource.
    pub fn get(&self, resource: Resizable) -> (i64, i64) {
        match resource {
            Resizable::Cpu => (self.cpu_request, self.cpu_limit),
            Resizable::Memory => (self.memory_request, self.memory_limit),
        }
    }
}

/// A container's resources with the limits by which it is started: of cpu and memory the pod's where it has none of its own.
pub fn effective(pod: &Pod, container: &Container) -> ResourceRequirements {
    let mut resources = container.resources.clone().unwrap_or_default();
    let of_pod = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()).and_then(|r| r.limits.as_ref());
    for name in ["cpu", "memory"] {
        let own = resources.limits.as_ref().and_then(|limits| limits.get(name));
        let is_limited = own.and_then(|own| Amount::try_from(own).ok()).is_some_and(Amount::is_positive);
        if let Some(limit) = of_pod.and_then(|limits| limits.get(name)).filter(|_| !is_limited) {
            resources.limits.get_or_insert_default().insert(name.to_owned(), limit.clone());
        }
    }
    resources
}

/// What is in force for a running container: what was recorded when it was applied, else what the runtime reports. Of a
/// runtime that reports nothing it is assumed to be `allocated`.
pub fn in_force(recorded: Option<&ResourceRequirements>, allocated: Compute, reported: ContainerResources) -> Compute {
    if let Some(recorded) = recorded {
        return Compute::of(recorded);
    }
    if reported == ContainerResources::default() {
        return allocated;
    }
    // Amounts that are too small for a cgroup count as equal.
    let or_minimal = |reported: i64, allocated: i64, minimum: i64| {
        if reported > 0 && reported <= minimum && allocated <= minimum { allocated } else { reported }
    };
    let request = reported.cpu_request.filter(|_| allocated.cpu_request > 0);
    Compute {
        cpu_request: request.map_or(allocated.cpu_request, |it| or_minimal(it, allocated.cpu_request, MIN_CPU_REQUEST)),
        cpu_limit: or_minimal(reported.cpu_limit.unwrap_or(0), allocated.cpu_limit, MIN_CPU_LIMIT),
        memory_request: allocated.memory_request,
        memory_limit: reported.memory_limit.unwrap_or(0),
    }
}

/// Something that is allocated to the pod is not applied to a running container of it, or to the pod itself. Upstream:
/// `IsPodResizeInProgress`.
pub fn is_resizing(pod: &Pod, snapshot: &PodSnapshot, actuated: Option<&PodResources>) -> bool {
    let newest = snapshot.newest_by_name();
    let differs = |container: spec::SpecContainer<'_>| {
        let Some(newest) = newest.get(container.name()) else { return false };
        let allocated = Compute::of(&effective(pod, container.spec));
        let recorded = actuated.and_then(|actuated| actuated.containers.get(container.name()));
        newest.state == ContainerState::Running && in_force(recorded, allocated, newest.resources) != allocated
    };
    is_pod_level_behind(pod, actuated)
        || spec::lasting_containers(pod).filter(|c| c.class != ContainerClass::Init).any(differs)
}

/// What is allocated to the pod as a whole is not applied to it. A pod that was started without `spec.resources` has none
/// applied; one without any record counts as up to date.
pub fn is_pod_level_behind(pod: &Pod, actuated: Option<&PodResources>) -> bool {
    let wanted = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let Some((actuated, wanted)) = actuated.zip(wanted) else { return false };
    actuated.pod.as_ref().map(Compute::of).unwrap_or_default() != Compute::of(wanted)
}

/// `resizePolicy[].restartPolicy` of containers that a resize restarts (KEP-1287).
pub const RESTART_CONTAINER: &str = "RestartContainer";

/// A change of this resource needs a restart of the container (`resizePolicy`).
pub fn needs_restart(container: &Container, resource: Resizable) -> bool {
    let mut policies = container.resize_policy.iter().flatten();
    policies.any(|policy| policy.resource_name == resource.name() && policy.restart_policy == RESTART_CONTAINER)
}

#[cfg(test)]
#[path = "resources_tests.rs"]
mod tests;
