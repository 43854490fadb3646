//! CRI resources from requests and limits. Pure; the arithmetic is in `cgroups`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceRequirements;
use keblet_proto::cri::v1::HugepageLimit;
use keblet_proto::cri::v1::LinuxContainerResources;

use super::GenerateError;
use super::ResourceSettings;
use super::Swap;
use super::memory_qos;
use super::memory_qos::MemoryAmounts;
use super::oom_score;
use crate::cgroups::CgroupValues;
use crate::cgroups::arithmetic;
use crate::model::Amount;
use crate::model::QosClass;
use crate::model::qos;
use crate::model::qos::Amounts;
use crate::model::qos::ResourceKind;
use crate::model::spec;

/// cpu and memory of a container or a pod, as far as set.
#[derive(Clone, Copy, Default)]
struct Compute {
    cpu_request: Option<Amount>,
    cpu_limit: Option<Amount>,
    memory_limit: Option<Amount>,
}

impl Compute {
    fn of(requests: &Amounts, limits: &Amounts) -> Self {
        Self {
            cpu_request: requests.get("cpu").copied(),
            cpu_limit: limits.get("cpu").copied(),
            memory_limit: limits.get("memory").copied(),
        }
    }

    /// Shares by request, else by limit; quota by limit, period always.
    fn to_cri(self, settings: &ResourceSettings) -> LinuxContainerResources {
        let cpu = self.cpu_request.or(self.cpu_limit).map_or(0, Amount::milli_value);
        let limit = self.cpu_limit.map_or(0, Amount::milli_value);
        let mut resources = LinuxContainerResources {
            cpu_shares: saturating(arithmetic::shares(cpu)),
            memory_limit_in_bytes: self.memory_limit.map_or(0, Amount::value),
            ..Default::default()
        };
        if let Some(period) = settings.cfs_period {
            resources.cpu_period = saturating(period);
            resources.cpu_quota = arithmetic::quota(limit, period);
        }
        if settings.cgroup_v2 && !settings.single_process_oom_kill {
            resources.unified.insert("memory.oom.group".to_owned(), "1".to_owned());
        }
        resources
    }
}

fn saturating(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// `LinuxContainerConfig.resources`.
///
/// # Errors
/// A quantity that cannot be read.
pub fn container_resources(
    pod: &Pod,
    container: &Container,
    settings: &ResourceSettings,
) -> Result<LinuxContainerResources, GenerateError> {
    let requests = qos::amounts(container.resources.as_ref().and_then(|r| r.requests.as_ref()))?;
    let own_limits = qos::amounts(container.resources.as_ref().and_then(|r| r.limits.as_ref()))?;
    let pod_resources = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    let pod_limits = qos::amounts(pod_resources.and_then(|r| r.limits.as_ref()))?;
    let has_pod_limit = pod_limits.contains_key("memory");
    let memory = MemoryAmounts { request: bytes(&requests, "memory"), limit: bytes(&own_limits, "memory") };
    let mut limits = pod_limits;
    // A zero limit of cpu or memory is none. One of huge pages is a limit.
    limits.extend(own_limits.into_iter().filter(|(name, own)| !own.is_zero() || page_size_of(name).is_some()));
    let mut resources = Compute::of(&requests, &limits).to_cri(settings);
    resources.oom_score_adj = oom_score::oom_score(pod, container, settings.memory_capacity)?;
    resources.hugepage_limits = hugepages(&limits, settings);
    let class = qos::qos_class(pod)?;
    let protection = memory_qos::container(class, memory, !has_pod_limit, settings);
    resources.unified.extend(protection.into_iter().map(|(key, value)| (key.to_owned(), value)));
    apply_swap(pod, class, memory, settings, &mut resources);
    Ok(resources)
}

fn bytes(amounts: &Amounts, name: &str) -> i64 {
    amounts.get(name).map_or(0, |amount| amount.value())
}

/// Limits for every page size of the node: 0 where the container has none.
fn hugepages(limits: &Amounts, settings: &ResourceSettings) -> Vec<HugepageLimit> {
    let limit_of = |bytes: u64| {
        limits
            .iter()
            .filter_map(|(name, amount)| Some((page_size_of(name)?, amount)))
            .find(|(size, _)| *size == bytes)
            .map_or(0, |(_, amount)| u64::try_from(amount.value()).unwrap_or(0))
    };
    let sizes = settings.hugepage_sizes.iter();
    sizes
        .map(|bytes| HugepageLimit { page_size: arithmetic::page_size_name(*bytes), limit: limit_of(*bytes) })
        .collect()
}

/// Bytes of a page in a resource name like `hugepages-2Mi`.
fn page_size_of(resource: &str) -> Option<u64> {
    let size: Amount = resource.strip_prefix("hugepages-")?.parse().ok()?;
    u64::try_from(size.value()).ok()
}

fn apply_swap(
    pod: &Pod,
    class: QosClass,
    memory: MemoryAmounts,
    settings: &ResourceSettings,
    resources: &mut LinuxContainerResources,
) {
    let allowed = match settings.swap {
        Swap::NoController => return,
        Swap::Forbidden => 0,
        Swap::Limited { node_swap } => swap_share(pod, class, memory, settings.memory_capacity, node_swap),
    };
    if settings.cgroup_v2 {
        resources.unified.insert("memory.swap.max".to_owned(), allowed.to_string());
    } else {
        resources.memory_swap_limit_in_bytes = resources.memory_limit_in_bytes;
    }
}

/// LimitedSwap (KEP-2400): containers of Burstable pods that are not critical get swap in proportion to their memory
/// request, unless it equals their limit.
fn swap_share(pod: &Pod, class: QosClass, memory: MemoryAmounts, node_memory: i64, node_swap: i64) -> i64 {
    if class != QosClass::Burstable || spec::is_critical(pod) || memory.request == memory.limit {
        return 0;
    }
    let share = i128::from(memory.request) * i128::from(node_swap) / i128::from(node_memory.max(1));
    i64::try_from(share).unwrap_or(i64::MAX)
}

/// `LinuxPodSandboxConfig.resources`: the pod's total without overhead.
///
/// # Errors
/// A quantity that cannot be read.
pub fn sandbox_resources(pod: &Pod, settings: &ResourceSettings) -> Result<LinuxContainerResources, GenerateError> {
    let requests = qos::pod_total(pod, ResourceKind::Requests, false)?;
    let limits = qos::pod_total(pod, ResourceKind::Limits, false)?;
    Ok(Compute::of(&requests, &limits).to_cri(settings))
}

/// `LinuxPodSandboxConfig.overhead`.
///
/// # Errors
/// A quantity that cannot be read.
pub fn sandbox_overhead(pod: &Pod, settings: &ResourceSettings) -> Result<LinuxContainerResources, GenerateError> {
    let Some(overhead) = pod.spec.as_ref().and_then(|spec| spec.overhead.as_ref()) else {
        return Ok(LinuxContainerResources::default());
    };
    let amounts = qos::amounts(Some(overhead))?;
    Ok(Compute::of(&amounts, &amounts).to_cri(settings))
}

/// Values for the pod's own cgroup.
///
/// # Errors
/// A quantity that cannot be read.
pub fn pod_cgroup_values(pod: &Pod, settings: &ResourceSettings) -> Result<CgroupValues, GenerateError> {
    let class = qos::qos_class(pod)?;
    let requests = qos::pod_total(pod, ResourceKind::Requests, true)?;
    let limits = qos::pod_total(pod, ResourceKind::Limits, true)?;
    let milli = |amounts: &Amounts, name: &str| amounts.get(name).map_or(0, |amount| amount.milli_value());
    let limited =
        |name: &str| class == QosClass::Guaranteed || (class == QosClass::Burstable && all_limited(pod, name));
    let mut values = CgroupValues { pids: settings.pod_pids_limit, ..CgroupValues::default() };
    values.cpu_shares = arithmetic::shares(if class == QosClass::BestEffort { 0 } else { milli(&requests, "cpu") });
    if limited("cpu") {
        values.cpu_max = Some(match settings.cfs_period {
            Some(period) => (arithmetic::quota(milli(&limits, "cpu"), period), period),
            None => (-1, arithmetic::DEFAULT_CFS_PERIOD),
        });
    }
    if limited("memory") {
        values.memory_max = limits.get("memory").and_then(|amount| u64::try_from(amount.value()).ok());
    }
    values.hugepages = hugepage_totals(&requests, settings);
    let pod_limits = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()).and_then(|r| r.limits.as_ref());
    let has_own_limit = limited("memory") && pod_limits.is_some_and(|limits| limits.contains_key("memory"));
    let limit = if has_own_limit { bytes(&limits, "memory") } else { 0 };
    let memory = MemoryAmounts { request: bytes(&requests, "memory"), limit };
    memory_qos::pod(&mut values, class, memory, settings);
    Ok(values)
}

fn hugepage_totals(requests: &Amounts, settings: &ResourceSettings) -> BTreeMap<u64, u64> {
    let mut totals: BTreeMap<u64, u64> = settings.hugepage_sizes.iter().map(|bytes| (*bytes, 0)).collect();
    for (name, amount) in requests {
        if let Some(total) = page_size_of(name).and_then(|size| totals.get_mut(&size)) {
            // A size may be named in two ways: `hugepages-2Mi` and `hugepages-2097152`.
            *total = total.saturating_add(u64::try_from(amount.value()).unwrap_or(0));
        }
    }
    totals
}

/// The pod itself has this limit, or every regular container has, and every step of the init sequence: an init container
/// or sidecar without one counts as limited behind a sidecar with one, since the kubelet adds up what runs at that step.
fn all_limited(pod: &Pod, name: &str) -> bool {
    let has = |resources: Option<&ResourceRequirements>| {
        resources
            .and_then(|r| r.limits.as_ref())
            .and_then(|limits| limits.get(name))
            .and_then(|quantity| Amount::try_from(quantity).ok())
            .is_some_and(Amount::is_positive)
    };
    let has_own = |container: &Container| has(container.resources.as_ref());
    let mut behind_sidecar = false;
    let is_step_limited = |init: &Container| {
        behind_sidecar |= spec::is_sidecar(init) && has_own(init);
        behind_sidecar || has_own(init)
    };
    has(pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()))
        || (spec::init_containers(pod).iter().all(is_step_limited) && spec::regular_containers(pod).iter().all(has_own))
}

/// What a pod requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodRequest {
    /// Thousandths of a CPU.
    pub milli_cpu: i64,
    /// Bytes of memory.
    pub memory: i64,
}

/// Request of the whole pod with its overhead, of which its QoS class gets the sum.
///
/// # Errors
/// A quantity that cannot be read.
pub fn requested(pod: &Pod) -> Result<PodRequest, GenerateError> {
    let total = qos::pod_total(pod, ResourceKind::Requests, true)?;
    let of = |name: &str, value: fn(Amount) -> i64| total.get(name).copied().map_or(0, value);
    Ok(PodRequest { milli_cpu: of("cpu", Amount::milli_value), memory: of("memory", Amount::value) })
}
