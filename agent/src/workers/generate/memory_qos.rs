//! Protection and throttling of memory on cgroup v2 (KEP-2570): `memory.min`, `memory.low` and `memory.high` of containers
//! and pods. Pure.

use super::ResourceSettings;
use crate::cgroups::CgroupValues;
use crate::model::QosClass;

/// The kernel's usual page size, where the system does not say.
const USUAL_PAGE: usize = 4096;

/// `MemoryQoS` is on.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct MemoryQos {
    /// `memoryReservationPolicy: TieredReservation`: requests of Guaranteed pods are never reclaimed, those of Burstable
    /// ones last.
    pub tiered: bool,
    /// `memoryThrottlingFactor`: processes are throttled before they reach this part of what lies between request and
    /// limit; `None` throttles nothing.
    pub throttling_factor: Option<f64>,
}

/// Request and limit of a container or pod, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct MemoryAmounts {
    /// 0 for none.
    pub request: i64,
    /// 0 for none.
    pub limit: i64,
}

/// Keys of CRI `unified` for a container. `may_use_node` is false if its pod has a limit of its own, which bounds a
/// container without one.
pub(super) fn container(
    class: QosClass,
    memory: MemoryAmounts,
    may_use_node: bool,
    settings: &ResourceSettings,
) -> Vec<(&'static str, String)> {
    if !settings.protects_memory {
        return Vec::new();
    }
    // Throttling that an earlier configuration set would outlive it.
    let Some(qos) = settings.memory_qos else { return vec![("memory.high", "max".to_owned())] };
    let protected = |of: QosClass| if qos.tiered && class == of { memory.request.max(0) } else { 0 };
    let mut keys = vec![
        ("memory.min", protected(QosClass::Guaranteed).to_string()),
        ("memory.low", protected(QosClass::Burstable).to_string()),
    ];
    if memory.limit > 0 || may_use_node {
        keys.extend(high(memory, qos, settings).map(|bytes| ("memory.high", bytes.to_string())));
    }
    keys
}

/// Values of a pod's cgroup. `limit` of `memory` is that of `spec.resources`, 0 without.
pub(super) fn pod(values: &mut CgroupValues, class: QosClass, memory: MemoryAmounts, settings: &ResourceSettings) {
    let Some(qos) = settings.memory_qos.filter(|_| settings.protects_memory) else { return };
    let request = u64::try_from(memory.request).ok().filter(|bytes| *bytes > 0 && qos.tiered);
    match class {
        QosClass::Guaranteed => values.memory_min = request,
        QosClass::Burstable => values.memory_low = request,
        QosClass::BestEffort => {}
    }
    if memory.limit > 0 {
        values.memory_high = high(memory, qos, settings).and_then(|bytes| u64::try_from(bytes).ok());
    }
}

/// The request and a part of what lies between it and the limit (the node's allocatable memory without one), in whole pages;
/// `None` if nothing lies between.
fn high(memory: MemoryAmounts, qos: MemoryQos, settings: &ResourceSettings) -> Option<i64> {
    let MemoryAmounts { request, limit } = memory;
    let factor = qos.throttling_factor?;
    if limit != 0 && request == limit {
        return None;
    }
    let allocatable = || settings.allocatable.get("memory").map_or(0, |amount| amount.value());
    let most = if limit == 0 { allocatable() } else { limit };
    let page = if settings.page_size == 0 { USUAL_PAGE } else { settings.page_size } as f64;
    let bytes = request as f64 + (most - request) as f64 * factor;
    let bytes = ((bytes / page).floor() * page) as i64;
    (bytes > request).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: i64 = 1 << 20;

    fn settings(qos: Option<MemoryQos>) -> ResourceSettings {
        let allocatable = [("memory".to_owned(), "1000Mi".parse().expect("an amount"))].into();
        ResourceSettings {
            cgroup_v2: true,
            protects_memory: true,
            memory_qos: qos,
            page_size: 4096,
            allocatable,
            ..Default::default()
        }
    }

    fn keys(class: QosClass, request: i64, limit: i64, qos: Option<MemoryQos>) -> Vec<String> {
        let memory = MemoryAmounts { request: request * MIB, limit: limit * MIB };
        let keys = container(class, memory, true, &settings(qos));
        keys.into_iter().map(|(key, value)| format!("{}={value}", key.trim_start_matches("memory."))).collect()
    }

    #[test]
    fn without_the_gate_throttling_is_removed() {
        assert_eq!(keys(QosClass::Burstable, 1, 2, None), ["high=max"]);
        let unprotected = ResourceSettings { protects_memory: false, ..settings(Some(MemoryQos::default())) };
        assert_eq!(container(QosClass::Burstable, MemoryAmounts::default(), true, &unprotected), []);
    }

    #[test]
    fn by_default_nothing_is_protected_or_throttled() {
        for class in [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort] {
            assert_eq!(keys(class, 10, 20, Some(MemoryQos::default())), ["min=0", "low=0"]);
        }
    }

    #[test]
    fn tiers_protect_requests() {
        let tiered = Some(MemoryQos { tiered: true, throttling_factor: None });
        assert_eq!(keys(QosClass::Guaranteed, 1, 1, tiered), ["min=1048576", "low=0"]);
        assert_eq!(keys(QosClass::Burstable, 1, 2, tiered), ["min=0", "low=1048576"]);
        assert_eq!(keys(QosClass::BestEffort, 0, 0, tiered), ["min=0", "low=0"]);
    }

    #[test]
    fn throttling_begins_between_request_and_limit() {
        let throttled = Some(MemoryQos { tiered: false, throttling_factor: Some(0.9) });
        let high = |class, request, limit| keys(class, request, limit, throttled).get(2).cloned();
        // 100 + 0.9 * 100 MiB
        assert_eq!(high(QosClass::Burstable, 100, 200), Some(format!("high={}", 190 * MIB)));
        assert_eq!(high(QosClass::Burstable, 0, 1), Some("high=942080".to_owned()), "in whole pages");
        assert_eq!(high(QosClass::Burstable, 100, 0), Some(format!("high={}", 910 * MIB)), "allocatable of the node");
        assert_eq!(high(QosClass::BestEffort, 0, 0), Some(format!("high={}", 900 * MIB)));
        assert_eq!(high(QosClass::Guaranteed, 100, 100), None);
        assert_eq!(high(QosClass::Burstable, 2000, 0), None, "more than the node has");
        let bounded = container(QosClass::Burstable, MemoryAmounts::default(), false, &settings(throttled));
        assert_eq!(bounded.len(), 2, "the limit of the pod counts");
    }

    #[test]
    fn pods_are_protected_by_class_and_throttled_by_their_own_limit() {
        let qos = Some(MemoryQos { tiered: true, throttling_factor: Some(0.5) });
        let values = |class, request, limit| {
            let mut values = CgroupValues::default();
            pod(&mut values, class, MemoryAmounts { request: request * MIB, limit: limit * MIB }, &settings(qos));
            [values.memory_min, values.memory_low, values.memory_high].map(|bytes| bytes.map(|bytes| bytes >> 20))
        };
        assert_eq!(values(QosClass::Guaranteed, 8, 8), [Some(8), None, None]);
        assert_eq!(values(QosClass::Burstable, 8, 16), [None, Some(8), Some(12)]);
        assert_eq!(values(QosClass::Burstable, 0, 0), [None; 3]);
        assert_eq!(values(QosClass::BestEffort, 0, 0), [None; 3]);
    }
}
