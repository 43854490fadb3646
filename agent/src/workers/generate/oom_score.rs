//! The out-of-memory score of containers, which follows from the pod's QoS class and the container's memory request. Pure.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use crate::model::QosClass;
use crate::model::qos::InvalidAmount;
use crate::model::qos::ResourceKind;
use crate::model::qos::amounts;
use crate::model::qos::containers;
use crate::model::qos::containers_total;
use crate::model::qos::qos_class;
use crate::model::spec;

/// `oom_score_adj` of Guaranteed and node-critical pods.
const GUARANTEED_SCORE: i64 = -997;
/// `oom_score_adj` of BestEffort containers.
const BEST_EFFORT_SCORE: i64 = 1000;
/// `priorityClassName` of node-critical pods.
const NODE_CRITICAL: &str = "system-node-critical";

/// `oom_score_adj` of one container.
///
/// # Errors
/// A quantity that cannot be read.
pub(super) fn oom_score(pod: &Pod, container: &Container, memory_capacity: i64) -> Result<i64, InvalidAmount> {
    if is_node_critical(pod) {
        return Ok(GUARANTEED_SCORE);
    }
    match qos_class(pod)? {
        QosClass::Guaranteed => return Ok(GUARANTEED_SCORE),
        QosClass::BestEffort => return Ok(BEST_EFFORT_SCORE),
        QosClass::Burstable => {}
    }
    let rest = unclaimed_memory(pod)?;
    let score = |memory: i64| 1000 - 1000 * (i128::from(memory) + rest) / i128::from(memory_capacity.max(1));
    let mut own = score(memory_request(container)?);
    if spec::init_containers(pod).iter().any(|init| init.name == container.name && spec::is_sidecar(init)) {
        let smallest =
            spec::regular_containers(pod).iter().map(memory_request).collect::<Result<Vec<_>, _>>()?.into_iter().min();
        own = own.min(smallest.map_or(own, score));
    }
    // Above the Guaranteed ones, below BestEffort.
    Ok(i64::try_from(own.clamp(3, 999)).unwrap_or(999))
}

fn is_node_critical(pod: &Pod) -> bool {
    let class = pod.spec.as_ref().and_then(|spec| spec.priority_class_name.as_deref());
    spec::is_critical(pod) && class == Some(NODE_CRITICAL)
}

fn memory_request(container: &Container) -> Result<i64, InvalidAmount> {
    let requests = amounts(container.resources.as_ref().and_then(|r| r.requests.as_ref()))?;
    Ok(requests.get("memory").map_or(0, |amount| amount.value()))
}

/// Each container's share of what the pod requests beyond its containers' sum (KEP-2837). More than an `i64` can be: no
/// request has to be one that a node can have.
fn unclaimed_memory(pod: &Pod) -> Result<i128, InvalidAmount> {
    let Some(spec) = &pod.spec else { return Ok(0) };
    let stated = amounts(spec.resources.as_ref().and_then(|r| r.requests.as_ref()))?;
    let Some(stated) = stated.get("memory") else { return Ok(0) };
    let claimed = containers_total(pod, ResourceKind::Requests)?.get("memory").map_or(0, |amount| amount.value());
    let count = i128::try_from(containers(pod).count().max(1)).unwrap_or(i128::MAX);
    Ok((i128::from(stated.value()) - i128::from(claimed)).max(0) / count)
}
