//! Values of the cgroup of all pods and of those of reserved daemons. Pure.

use std::collections::BTreeMap;

use crate::cgroups::CgroupValues;
use crate::cgroups::arithmetic;
use crate::config::KubeletConfiguration;
use crate::model::qos::Amounts;
use crate::node::Sizes;
use crate::node::resources::Reservations;
use crate::node::resources::ResourceConfig;
use crate::node::resources::pod_limits;

/// Values of the cgroup of all pods: the node's capacity, without reservations if `enforceNodeAllocatable` has `pods`.
/// Limits of huge pages are left to the QoS classes, which have none. `cpus` are those that are online.
pub fn kubepods(sizes: &Sizes, kubelet: &KubeletConfiguration, config: &ResourceConfig, cpus: &str) -> CgroupValues {
    let enforced = kubelet.cgroups_per_qos && kubelet.enforce_node_allocatable.iter().any(|class| class == "pods");
    let limits = pod_limits(sizes, enforced.then_some(config));
    with_cpus(of_amounts(&limits), cpus)
}

/// A kind of daemons that resources are reserved for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// `systemReserved`
    System,
    /// `kubeReserved`
    Kube,
}

/// A reservation that is enforced on a cgroup.
#[derive(Clone, PartialEq, Debug)]
pub struct Reservation {
    /// The reserved daemons.
    pub class: Class,
    /// Only the CPU weight is set.
    pub compressible: bool,
    /// `systemReservedCgroup` or `kubeReservedCgroup`.
    pub cgroup: String,
    /// `None` if nothing is reserved: there is no value to enforce.
    pub values: Option<CgroupValues>,
}

/// The reservations that `enforceNodeAllocatable` names, in the order in which the kubelet enforces them. With
/// `protects_memory` (gate `MemoryQoS`, KEP-2570) reserved memory is protected as well as limited.
pub fn reservations(
    kubelet: &KubeletConfiguration,
    protects_memory: bool,
    hugepage_sizes: &[u64],
    cpus: &str,
) -> Vec<Reservation> {
    let Reservations { system, kube } = Reservations::new(kubelet);
    let table = [
        ("system-reserved", Class::System, false),
        ("kube-reserved", Class::Kube, false),
        ("system-reserved-compressible", Class::System, true),
        ("kube-reserved-compressible", Class::Kube, true),
    ];
    let enforced = |(name, _, _): &(&str, Class, bool)| kubelet.enforce_node_allocatable.iter().any(|all| all == name);
    let reservation = |(_, class, compressible)| {
        let (amounts, cgroup) = match class {
            Class::System => (&system, &kubelet.system_reserved_cgroup),
            Class::Kube => (&kube, &kubelet.kube_reserved_cgroup),
        };
        let values = || {
            let mut values = of_amounts(amounts);
            if compressible {
                values = CgroupValues { cpu_shares: values.cpu_shares, ..CgroupValues::default() };
            }
            values.memory_min = values.memory_max.filter(|_| protects_memory);
            // Daemons get none: huge pages cannot be reserved.
            values.hugepages = hugepage_sizes.iter().map(|size| (*size, 0)).collect::<BTreeMap<u64, u64>>();
            with_cpus(values, cpus)
        };
        Reservation { class, compressible, cgroup: cgroup.clone(), values: (!amounts.is_empty()).then(values) }
    };
    table.into_iter().filter(enforced).map(reservation).collect()
}

fn of_amounts(amounts: &Amounts) -> CgroupValues {
    let positive = |name: &str| amounts.get(name).map(|amount| amount.value());
    CgroupValues {
        cpu_shares: amounts.get("cpu").map_or(0, |amount| arithmetic::shares(amount.milli_value())),
        memory_max: positive("memory").and_then(|bytes| u64::try_from(bytes).ok()),
        pids: positive("pid"),
        ..CgroupValues::default()
    }
}

/// With the systemd driver a slice without CPUs of its own has no cpuset controller.
fn with_cpus(values: CgroupValues, cpus: &str) -> CgroupValues {
    CgroupValues { cpus: Some(cpus.to_owned()).filter(|cpus| !cpus.is_empty()), ..values }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn config(fields: Value) -> KubeletConfiguration {
        serde_json::from_value(fields).expect("a configuration")
    }

    fn all(fields: Value) -> Vec<Reservation> {
        reservations(&config(fields), true, &[2 << 20], "0-1")
    }

    #[test]
    fn pods_are_limited_by_what_is_not_reserved() {
        let sizes = Sizes { cpus: 4, memory: 8 << 30, pids: 32768, ..Sizes::default() };
        let values = |enforced: Value| {
            let kubelet = config(json!({
                "enforceNodeAllocatable": enforced, "systemReserved": { "cpu": "1", "memory": "1Gi", "pid": "768" },
                "evictionHard": { "memory.available": "1Gi" },
            }));
            kubepods(&sizes, &kubelet, &ResourceConfig::new(&kubelet, false), "0-3")
        };
        let expected = CgroupValues {
            cpu_shares: 3072,
            memory_max: Some(7 << 30),
            pids: Some(32000),
            cpus: Some("0-3".to_owned()),
            ..CgroupValues::default()
        };
        assert_eq!(values(json!(["pods"])), expected);
        let capacity = values(json!(["none"]));
        assert_eq!((capacity.cpu_shares, capacity.memory_max, capacity.pids), (4096, Some(8 << 30), Some(32768)));
    }

    #[test]
    fn reservations_become_values_in_the_order_of_enforcement() {
        let found = all(json!({
            "enforceNodeAllocatable": ["kube-reserved-compressible", "pods", "system-reserved"],
            "systemReserved": { "cpu": "500m", "memory": "1Gi", "pid": "100" }, "systemReservedCgroup": "/system",
            "kubeReserved": { "cpu": "250m", "memory": "1Gi" }, "kubeReservedCgroup": "/daemons",
        }));
        let system = CgroupValues {
            cpu_shares: 512,
            memory_max: Some(1 << 30),
            memory_min: Some(1 << 30),
            pids: Some(100),
            hugepages: [(2 << 20, 0)].into(),
            cpus: Some("0-1".to_owned()),
            ..CgroupValues::default()
        };
        let kube = CgroupValues { cpu_shares: 256, memory_max: None, memory_min: None, pids: None, ..system.clone() };
        let expected = [(Class::System, false, "/system", system), (Class::Kube, true, "/daemons", kube)];
        let expected = expected.map(|(class, compressible, cgroup, values)| Reservation {
            class,
            compressible,
            cgroup: cgroup.to_owned(),
            values: Some(values),
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn nothing_reserved_is_nothing_to_enforce() {
        let found = all(json!({ "enforceNodeAllocatable": ["kube-reserved"], "kubeReservedCgroup": "/k" }));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].values, None);
        assert_eq!(all(json!({ "enforceNodeAllocatable": ["pods"], "kubeReserved": { "cpu": "1" } })), []);
    }
}
