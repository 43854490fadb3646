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

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    /// The score of the container `c` on a node with 1000 MiB.
    fn score(spec: Value) -> i64 {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).expect("a pod");
        let container = containers(&pod).find(|container| container.name == "c").expect("the container");
        oom_score(&pod, container, 1000 << 20).expect("valid")
    }

    fn requesting(name: &str, memory: &str) -> Value {
        json!({"name": name, "resources": {"requests": {"memory": memory}}})
    }

    #[test]
    fn the_class_decides_unless_the_pod_is_burstable_or_critical_for_the_node() {
        let amounts = json!({"cpu": "1", "memory": "500Mi"});
        let guaranteed = json!([{"name": "c", "resources": {"requests": amounts, "limits": amounts}}]);
        let (plain, burstable) = (json!([{"name": "c"}]), json!([requesting("c", "500Mi")]));
        for (class, priority, containers, expected) in [
            (None, 0, &guaranteed, -997),
            (None, 0, &burstable, 500),
            (None, 0, &plain, 1000),
            (Some("system-cluster-critical"), 2_000_000_000, &plain, 1000),
            (Some("system-cluster-critical"), 2_000_000_000, &burstable, 500),
            (Some("system-node-critical"), 2_000_001_000, &burstable, -997),
        ] {
            let spec = json!({"priorityClassName": class, "priority": priority, "containers": containers});
            assert_eq!(score(spec.clone()), expected, "{spec}");
        }
    }

    #[test]
    fn what_a_pod_requests_beyond_its_containers_is_shared_among_them() {
        let of_pod = json!({"requests": {"memory": "600Mi"}});
        let (own, none) = (requesting("c", "200Mi"), json!({"name": "c"}));
        let with = |own: &Value, other: Value| score(json!({"resources": of_pod, "containers": [own, other]}));
        assert_eq!(with(&own, json!({"name": "other"})), 600, "200 MiB of its own, and half of the other 400");
        assert_eq!(with(&none, requesting("other", "200Mi")), 800);
        assert_eq!(with(&own, requesting("other", "400Mi")), 800, "nothing is left to be shared");
    }

    #[test]
    fn a_sidecar_is_not_killed_before_the_regular_containers_that_need_it() {
        let sidecar = |memory: &str| {
            let mut sidecar = requesting("c", memory);
            sidecar["restartPolicy"] = json!("Always");
            sidecar
        };
        let before = |init: Value| {
            let regular = [requesting("large", "500Mi"), requesting("small", "300Mi")];
            score(json!({"initContainers": [init], "containers": regular}))
        };
        assert_eq!(before(sidecar("10Mi")), 700, "as the regular container with the smallest request");
        assert_eq!(before(sidecar("600Mi")), 400, "its own request is larger");
        assert_eq!(before(requesting("c", "10Mi")), 990, "no regular container runs beside it");
    }
}
