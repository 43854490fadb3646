//! Capacity and allocatable of the node. Pure.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::NodeStatus;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::machine::Machine;
use super::machine::Sizes;
use crate::config::eviction::ThresholdValue;
use crate::config::eviction::threshold_value;
use crate::config::kubelet::KubeletConfiguration;
use crate::config::kubelet::StringMap;
use crate::config::parse_cpus;
use crate::model::Amount;
use crate::model::qos::Amounts;
use crate::model::resources::is_extended;

const HUGEPAGES: &str = "hugepages-";
/// Thresholds that count as reserved, with the resource they are taken from.
const THRESHOLDS: [(&str, &str); 2] = [("memory.available", "memory"), ("nodefs.available", "ephemeral-storage")];

/// What is reserved for daemons.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Reservations {
    /// `systemReserved`, with the CPUs of `reservedSystemCPUs`.
    pub system: Amounts,
    /// `kubeReserved`, without CPU where `reservedSystemCPUs` is set.
    pub kube: Amounts,
}

impl Reservations {
    /// From the configuration, whose quantities were validated.
    pub fn new(kubelet: &KubeletConfiguration) -> Self {
        let (mut system, mut kube) = (amounts(&kubelet.system_reserved), amounts(&kubelet.kube_reserved));
        if let Some(cpus) = Some(&kubelet.reserved_system_cpus).filter(|cpus| !cpus.is_empty()) {
            let count = parse_cpus(cpus).as_ref().map_or(0, BTreeSet::len);
            system.insert("cpu".to_owned(), Amount::units(i64::try_from(count).unwrap_or(i64::MAX)));
            kube.remove("cpu");
        }
        Self { system, kube }
    }

    fn total(self) -> Amounts {
        let mut total = self.system;
        for (resource, amount) in self.kube {
            *total.entry(resource).or_default() += amount;
        }
        total
    }
}

/// Settings of the node's resources.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ResourceConfig {
    /// `maxPods`.
    pub max_pods: i64,
    /// `podsPerCore`; 0 for no such limit.
    pub pods_per_core: i64,
    /// `localStorageCapacityIsolation`.
    pub local_storage: bool,
    /// `systemReserved` and `kubeReserved` together.
    pub reserved: Amounts,
    /// Hard eviction thresholds, by resource.
    pub thresholds: BTreeMap<String, ThresholdValue>,
    /// Resources of device plugins of an earlier kubelet: there is none of them. Not part of the configuration.
    pub devices: BTreeSet<String>,
}

/// A reservation exceeds the capacity.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "invalid Node Allocatable configuration. Resource {resource:?} has a reservation of {reserved} but capacity of \
     {capacity}. Expected capacity >= reservation."
)]
pub struct ReservationError {
    /// The resource.
    pub resource: String,
    /// The reservation.
    pub reserved: String,
    /// The capacity.
    pub capacity: String,
}

impl ResourceConfig {
    /// From the configuration. `ignore_eviction` is `--experimental-allocatable-ignore-eviction`.
    pub fn new(kubelet: &KubeletConfiguration, ignore_eviction: bool) -> Self {
        let threshold = |(signal, resource): (&str, &str)| {
            let value = threshold_value(signal, kubelet.eviction_hard.get(signal)?).ok()??;
            Some((resource.to_owned(), value))
        };
        let thresholds = if ignore_eviction { None } else { Some(THRESHOLDS.into_iter().filter_map(threshold)) };
        Self {
            max_pods: kubelet.max_pods.into(),
            pods_per_core: kubelet.pods_per_core.into(),
            local_storage: kubelet.local_storage_capacity_isolation,
            reserved: Reservations::new(kubelet).total(),
            thresholds: thresholds.into_iter().flatten().collect(),
            devices: BTreeSet::new(),
        }
    }

    fn pods(&self, cpus: i64) -> i64 {
        match self.pods_per_core {
            0 => self.max_pods,
            per_core => cpus.saturating_mul(per_core).min(self.max_pods),
        }
    }

    /// Reservation and eviction threshold of a resource of this capacity.
    fn kept(&self, resource: &str, capacity: Amount) -> Amount {
        let reserved = self.reserved.get(resource).copied().unwrap_or_default();
        reserved + self.thresholds.get(resource).map_or(Amount::ZERO, |threshold| threshold.of(capacity))
    }
}

/// Quantities were validated with the configuration.
fn amounts(map: &StringMap) -> Amounts {
    map.iter().filter_map(|(resource, text)| Some((resource.clone(), text.parse().ok()?))).collect()
}

/// Capacity of the machine.
fn capacity(sizes: &Sizes, config: &ResourceConfig) -> Amounts {
    let mut capacity = Amounts::from([
        ("cpu".to_owned(), Amount::units(sizes.cpus)),
        ("memory".to_owned(), Amount::bytes(sizes.memory)),
        ("pods".to_owned(), Amount::units(config.pods(sizes.cpus))),
    ]);
    if let Some(bytes) = sizes.root_fs.filter(|_| config.local_storage) {
        // In plain decimal, as upstream writes it since 1.37.
        capacity.insert("ephemeral-storage".to_owned(), Amount::units(bytes));
    }
    for (size, bytes) in &sizes.hugepages {
        capacity.insert(hugepages_name(*size), Amount::bytes(*bytes));
    }
    // Named with 0: what a node does not name counts as a resource of the cluster.
    capacity.extend(config.devices.iter().map(|name| (name.clone(), Amount::ZERO)));
    capacity
}

/// `hugepages-2Mi` for pages of 2 MiB.
fn hugepages_name(bytes: u64) -> String {
    format!("{HUGEPAGES}{}", Amount::bytes(i64::try_from(bytes).unwrap_or(i64::MAX)))
}

/// Checks at start that reservations do not exceed the capacity.
///
/// # Errors
/// The first resource with a larger reservation.
pub fn check(sizes: &Sizes, config: &ResourceConfig) -> Result<(), ReservationError> {
    let mut all = capacity(sizes, config);
    all.remove("pods");
    all.insert("pid".to_owned(), Amount::units(sizes.pids));
    for (resource, capacity) in all {
        let reserved = config.kept(&resource, capacity);
        if reserved > capacity {
            let (reserved, capacity) = (reserved.to_string(), capacity.to_string());
            return Err(ReservationError { resource, reserved, capacity });
        }
    }
    Ok(())
}

/// Allocatable: capacity without reservations and thresholds.
pub fn allocatable(sizes: &Sizes, config: &ResourceConfig) -> Amounts {
    let capacity = capacity(sizes, config);
    of_capacity(&capacity, config)
}

/// What all pods together may use of cpu, memory and pids: the capacity, with `reserved` without what is reserved for
/// daemons. Eviction thresholds are not subtracted: the kernel's limit lies above them, so that pods are evicted first.
pub fn pod_limits(sizes: &Sizes, reserved: Option<&ResourceConfig>) -> Amounts {
    let capacity = [
        ("cpu", Amount::units(sizes.cpus)),
        ("memory", Amount::bytes(sizes.memory)),
        ("pid", Amount::units(sizes.pids)),
    ];
    let left = |(resource, capacity): (&str, Amount)| {
        let reserved = reserved.and_then(|config| config.reserved.get(resource)).copied().unwrap_or_default();
        (resource.to_owned(), (capacity - reserved).max(Amount::ZERO))
    };
    let is_known = |(resource, _): &(&str, Amount)| *resource != "pid" || sizes.pids < i64::MAX;
    capacity.into_iter().filter(is_known).map(left).collect()
}

fn of_capacity(capacity: &Amounts, config: &ResourceConfig) -> Amounts {
    let reservable = |resource: &str| {
        matches!(resource, "cpu" | "memory" | "ephemeral-storage" | "pid") || resource.starts_with(HUGEPAGES)
    };
    let left = |amount: Amount, taken: Amount| (amount - taken).max(Amount::ZERO);
    let mut allocatable: Amounts = capacity
        .iter()
        .map(|(resource, amount)| {
            let kept = if reservable(resource) { config.kept(resource, *amount) } else { Amount::ZERO };
            (resource.clone(), left(*amount, kept))
        })
        .collect();
    let huge: Amount = capacity.iter().filter(|(name, _)| name.starts_with(HUGEPAGES)).map(|(_, a)| *a).sum();
    if let Some(memory) = allocatable.get_mut("memory") {
        *memory = left(*memory, huge);
    }
    allocatable
}

/// Sets capacity and allocatable of a status. Extended resources of others than device plugins are kept. An allocatable
/// amount without a capacity is kept as with upstream, unless it is one of an extended resource.
pub(super) fn apply(machine: &Machine, config: &ResourceConfig, status: &mut NodeStatus) {
    let known = status.capacity.take().unwrap_or_default();
    let mut all: Amounts =
        known.iter().filter_map(|(name, text)| Some((name.clone(), text.try_into().ok()?))).collect();
    match &machine.sizes {
        Some(sizes) => all.extend(capacity(sizes, config)),
        None => all.extend([
            ("cpu".to_owned(), Amount::ZERO),
            ("memory".to_owned(), Amount::bytes(0)),
            ("pods".to_owned(), Amount::units(config.max_pods)),
        ]),
    }
    let allocatable = of_capacity(&all, config);
    status.capacity = Some(quantities(&all, &known));
    let known = status.allocatable.take().unwrap_or_default();
    let allocatable = quantities(&allocatable, &known);
    let mut amounts = known;
    amounts.retain(|name, _| !is_extended(name));
    amounts.extend(allocatable);
    status.allocatable = Some(amounts);
}

/// As quantities; a known text of the same amount is kept in its notation.
fn quantities(amounts: &Amounts, known: &BTreeMap<String, Quantity>) -> BTreeMap<String, Quantity> {
    let text = |(name, amount): (&String, &Amount)| {
        let same = known.get(name).filter(|text| Amount::try_from(*text).is_ok_and(|known| known == *amount));
        (name.clone(), same.cloned().unwrap_or_else(|| amount.to_quantity()))
    };
    amounts.iter().map(text).collect()
}

#[cfg(test)]
#[path = "resources_tests.rs"]
mod tests;
