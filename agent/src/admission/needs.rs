//! What pods hold of a node, in the units in which it is compared: thousandths of a CPU, bytes, whole devices. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use super::host_ports::HostPort;
use super::host_ports::host_ports;
use crate::model::Amount;
use crate::model::resources::is_extended;

/// The count of pods, as a resource.
pub(super) const PODS: &str = "pods";
pub(super) const CPU: &str = "cpu";
pub(super) const MEMORY: &str = "memory";
pub(super) const EPHEMERAL_STORAGE: &str = "ephemeral-storage";

/// Amounts of a node's resources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantities {
    /// Number of pods.
    pub pods: i64,
    /// Thousandths of a CPU.
    pub milli_cpu: i64,
    /// Bytes of memory.
    pub memory: i64,
    /// Bytes of local ephemeral storage.
    pub ephemeral_storage: i64,
    /// Bytes of huge pages, whole units of extended resources; by name.
    pub scalar: BTreeMap<String, i64>,
}

impl Quantities {
    /// Amounts by resource name, of a node. Names that are neither known to nodes nor extended resources are left out.
    pub fn of_node(amounts: &BTreeMap<String, Amount>) -> Self {
        let of = |name: &str, value: fn(Amount) -> i64| amounts.get(name).map_or(0, |amount| value(*amount).max(0));
        let scalar = amounts.iter().filter(|(name, _)| is_scalar(name));
        Self {
            pods: of(PODS, Amount::value),
            milli_cpu: of(CPU, Amount::milli_value),
            memory: of(MEMORY, Amount::value),
            ephemeral_storage: of(EPHEMERAL_STORAGE, Amount::value),
            scalar: scalar.map(|(name, amount)| (name.clone(), amount.value().max(0))).collect(),
        }
    }

    /// The request of one pod, by resource name.
    fn of_pod(requests: &BTreeMap<String, Amount>) -> Self {
        let mut quantities = Self { pods: 1, ..Self::of_node(requests) };
        quantities.scalar.retain(|_, amount| *amount > 0);
        quantities
    }

    /// More than any pods request, except of extended resources.
    pub fn unlimited() -> Self {
        let most = i64::MAX;
        let scalar = ["hugepages-2Mi", "hugepages-1Gi"].map(|name| (name.to_owned(), most)).into();
        Self { pods: most, milli_cpu: most, memory: most, ephemeral_storage: most, scalar }
    }

    /// The amount of a resource; 0 of an unknown one.
    pub(super) fn get(&self, resource: &str) -> i64 {
        match resource {
            PODS => self.pods,
            CPU => self.milli_cpu,
            MEMORY => self.memory,
            EPHEMERAL_STORAGE => self.ephemeral_storage,
            other => self.scalar.get(other).copied().unwrap_or(0),
        }
    }

    fn add(&mut self, more: &Self) {
        self.pods = self.pods.saturating_add(more.pods);
        self.milli_cpu = self.milli_cpu.saturating_add(more.milli_cpu);
        self.memory = self.memory.saturating_add(more.memory);
        self.ephemeral_storage = self.ephemeral_storage.saturating_add(more.ephemeral_storage);
        for (name, amount) in &more.scalar {
            match self.scalar.get_mut(name) {
                Some(sum) => *sum = sum.saturating_add(*amount),
                None => _ = self.scalar.insert(name.clone(), *amount),
            }
        }
    }
}

/// What one pod needs of its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Its request.
    pub request: Quantities,
    /// Its ports on the host.
    pub host_ports: Vec<HostPort>,
}

impl Needs {
    /// The needs of a pod with this request (containers, init sequence, overhead).
    pub fn new(pod: &Pod, requests: &BTreeMap<String, Amount>) -> Self {
        Self { request: Quantities::of_pod(requests), host_ports: host_ports(pod) }
    }
}

impl Needs {
    /// Raises each amount of the request to that of another one.
    pub fn raise(&mut self, other: &Self) {
        let (own, other) = (&mut self.request, &other.request);
        own.milli_cpu = own.milli_cpu.max(other.milli_cpu);
        own.memory = own.memory.max(other.memory);
        own.ephemeral_storage = own.ephemeral_storage.max(other.ephemeral_storage);
        for (name, amount) in &other.scalar {
            let held = own.scalar.entry(name.clone()).or_default();
            *held = (*held).max(*amount);
        }
    }

    /// It requests less CPU or memory than another one.
    pub fn is_below(&self, other: &Self) -> bool {
        self.request.milli_cpu < other.request.milli_cpu || self.request.memory < other.request.memory
    }
}

/// What the other pods of the node hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldResources {
    /// The sum of their requests.
    pub requested: Quantities,
    /// Their ports on the host.
    pub host_ports: Vec<HostPort>,
}

impl<'a> FromIterator<&'a Needs> for HeldResources {
    fn from_iter<I: IntoIterator<Item = &'a Needs>>(pods: I) -> Self {
        pods.into_iter().fold(Self::default(), |mut held, needs| {
            held.requested.add(&needs.request);
            held.host_ports.extend_from_slice(&needs.host_ports);
            held
        })
    }
}

/// Counted by name, beside cpu, memory, ephemeral storage and pods.
fn is_scalar(name: &str) -> bool {
    let is_native = name.contains("kubernetes.io/") || name.starts_with("attachable-volumes-");
    is_extended(name) || is_native || name.starts_with("hugepages-")
}

/// Containers that run at the same time: regular ones and sidecars.
pub(super) fn lasting<'a>(init: &'a [Container], regular: &'a [Container]) -> impl Iterator<Item = &'a Container> {
    init.iter().filter(|container| crate::model::spec::is_sidecar(container)).chain(regular)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn amounts(list: &[(&str, &str)]) -> BTreeMap<String, Amount> {
        list.iter().map(|(name, text)| ((*name).to_owned(), text.parse().expect(text))).collect()
    }

    #[test]
    fn quantities_are_in_the_units_of_messages() {
        let node = Quantities::of_node(&amounts(&[
            ("cpu", "1500m"),
            ("memory", "1Mi"),
            ("ephemeral-storage", "1k"),
            ("pods", "110"),
            ("hugepages-2Mi", "4Mi"),
            ("example.com/gpu", "2"),
            ("unknown", "3"),
        ]));
        assert_eq!((node.pods, node.milli_cpu, node.memory, node.ephemeral_storage), (110, 1500, 1 << 20, 1000));
        let scalar: Vec<(&str, i64)> = node.scalar.iter().map(|(name, amount)| (name.as_str(), *amount)).collect();
        assert_eq!(scalar, [("example.com/gpu", 2), ("hugepages-2Mi", 4 << 20)]);
        assert_eq!((node.get("cpu"), node.get("example.com/gpu"), node.get("unknown")), (1500, 2, 0));
    }

    #[test]
    fn a_pod_counts_as_one_and_never_as_less_than_nothing() {
        let requests = amounts(&[("cpu", "-1"), ("memory", "1"), ("pods", "7"), ("example.com/gpu", "0")]);
        let needs = Needs::new(&Pod::default(), &requests);
        assert_eq!(needs.request, Quantities { pods: 1, memory: 1, ..Quantities::default() });
        let held: HeldResources = [&needs, &needs].into_iter().collect();
        assert_eq!((held.requested.pods, held.requested.memory), (2, 2));
        let most = Needs { request: Quantities::unlimited(), ..Needs::default() };
        let held: HeldResources = [&most, &needs].into_iter().collect();
        assert_eq!(held.requested.memory, i64::MAX);
    }
}
