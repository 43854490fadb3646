//! CRI resources from requests and limits. Pure; the arithmetic is in `cgroups`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1::HugepageLimit;
use keblet_proto::cri::v1::LinuxContainerResources;

use super::GenerateError;
use super::ResourceSettings;
use super::Swap;
use super::qos;
use super::qos::Amounts;
use super::qos::ResourceKind;
use crate::cgroups::PodValues;
use crate::cgroups::QosClass;
use crate::cgroups::arithmetic;
use crate::model::Amount;
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
    let mut limits = qos::amounts(pod_resources.and_then(|r| r.limits.as_ref()))?;
    limits.extend(own_limits);
    let mut resources = Compute::of(&requests, &limits).to_cri(settings);
    resources.oom_score_adj = qos::oom_score(pod, container, settings.memory_capacity)?;
    resources.hugepage_limits = hugepages(&limits, settings);
    if settings.cgroup_v2 && !settings.single_process_oom_kill {
        resources.unified.insert("memory.oom.group".to_owned(), "1".to_owned());
    }
    apply_swap(pod, &requests, &limits, settings, &mut resources)?;
    Ok(resources)
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
    requests: &Amounts,
    limits: &Amounts,
    settings: &ResourceSettings,
    resources: &mut LinuxContainerResources,
) -> Result<(), GenerateError> {
    let allowed = match settings.swap {
        Swap::NoController => return Ok(()),
        Swap::Forbidden => 0,
        Swap::Limited { node_swap } => swap_share(pod, requests, limits, settings.memory_capacity, node_swap)?,
    };
    if settings.cgroup_v2 {
        resources.unified.insert("memory.swap.max".to_owned(), allowed.to_string());
    } else {
        resources.memory_swap_limit_in_bytes = resources.memory_limit_in_bytes;
    }
    Ok(())
}

/// LimitedSwap (KEP-2400): Burstable containers get swap in proportion to their memory request.
fn swap_share(pod: &Pod, requests: &Amounts, limits: &Amounts, memory: i64, swap: i64) -> Result<i64, GenerateError> {
    let request = requests.get("memory").copied().unwrap_or_default();
    let limit = limits.get("memory").copied().unwrap_or_default();
    let eligible = qos::qos_class(pod)? == QosClass::Burstable && !spec::is_critical(pod) && request != limit;
    if !eligible {
        return Ok(0);
    }
    let share = i128::from(request.value()) * i128::from(swap) / i128::from(memory.max(1));
    Ok(i64::try_from(share).unwrap_or(i64::MAX))
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
pub fn pod_cgroup_values(pod: &Pod, settings: &ResourceSettings) -> Result<PodValues, GenerateError> {
    let class = qos::qos_class(pod)?;
    let requests = qos::pod_total(pod, ResourceKind::Requests, true)?;
    let limits = qos::pod_total(pod, ResourceKind::Limits, true)?;
    let milli = |amounts: &Amounts, name: &str| amounts.get(name).map_or(0, |amount| amount.milli_value());
    let limited =
        |name: &str| class == QosClass::Guaranteed || (class == QosClass::Burstable && all_limited(pod, name));
    let mut values = PodValues { pids: settings.pod_pids_limit, ..PodValues::default() };
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
    Ok(values)
}

fn hugepage_totals(requests: &Amounts, settings: &ResourceSettings) -> BTreeMap<u64, u64> {
    let mut totals: BTreeMap<u64, u64> = settings.hugepage_sizes.iter().map(|bytes| (*bytes, 0)).collect();
    for (name, amount) in requests {
        if let Some(total) = page_size_of(name).and_then(|size| totals.get_mut(&size)) {
            *total = u64::try_from(amount.value()).unwrap_or(0);
        }
    }
    totals
}

/// Every container and init container has this limit, or the pod itself has.
fn all_limited(pod: &Pod, name: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let has = |resources: Option<&k8s_openapi::api::core::v1::ResourceRequirements>| {
        resources
            .and_then(|r| r.limits.as_ref())
            .and_then(|limits| limits.get(name))
            .and_then(|quantity| Amount::try_from(quantity).ok())
            .is_some_and(Amount::is_positive)
    };
    has(spec.resources.as_ref()) || qos::containers(pod).all(|container| has(container.resources.as_ref()))
}

/// CPU request of the whole pod in thousandths of a CPU, of which the weight of its QoS class is the sum.
///
/// # Errors
/// A quantity that cannot be read.
pub fn requested_milli_cpu(pod: &Pod) -> Result<i64, GenerateError> {
    Ok(qos::pod_total(pod, ResourceKind::Requests, true)?.get("cpu").map_or(0, |amount| amount.milli_value()))
}
