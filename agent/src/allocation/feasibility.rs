//! Resizes that this node can never perform, whatever other pods request. Upstream: `podResizesAdmitHandler`. Pure.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use crate::model::resources;
use crate::model::resources::Compute;
use crate::model::resources::Resizable;
use crate::model::spec;

/// Feature gates of resizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizeGates {
    /// InPlacePodLevelResourcesVerticalScaling (KEP-5419): allocations of `spec.resources` count.
    pub pod_level: bool,
    /// InPlacePodVerticalScalingInitContainers: resizes cover init containers that are no sidecars.
    pub init_containers: bool,
}

impl Default for ResizeGates {
    /// As they are by default.
    fn default() -> Self {
        Self { pod_level: true, init_containers: true }
    }
}

/// Settings of the node that rule resizes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResizePolicy {
    /// Gate InPlacePodLevelResourcesVerticalScaling (KEP-5419).
    pub pod_level: bool,
    /// CPUs are assigned exclusively, and the gate InPlacePodVerticalScalingExclusiveCPUs is off.
    pub fixed_cpus: bool,
    /// Memory is assigned to NUMA nodes, and the gate InPlacePodVerticalScalingExclusiveMemory is off.
    pub fixed_memory: bool,
    /// `memorySwap.swapBehavior: LimitedSwap` on a node that can limit swap by container.
    pub limited_swap: bool,
}

impl Default for ResizePolicy {
    /// Of a node with default settings.
    fn default() -> Self {
        Self { pod_level: true, fixed_cpus: false, fixed_memory: false, limited_swap: false }
    }
}

/// Why a resize is infeasible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Infeasible {
    /// Message of the condition.
    pub message: &'static str,
    /// Label `reason_detail` of the metric.
    pub detail: &'static str,
}

/// QoS class of a pod, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Requests equal limits.
    Guaranteed,
    /// Some requests or limits.
    Burstable,
    /// None.
    BestEffort,
}

/// Why this node never resizes `allocated` to `desired`; `None` if it may.
pub fn infeasible(desired: &Pod, allocated: &Pod, class: Class, policy: ResizePolicy) -> Option<Infeasible> {
    if policy.limited_swap && changes_memory_of_swapping_container(desired, allocated, class) {
        let message = "In-place resize of containers with swap is not supported.";
        return Some(Infeasible { message, detail: "swap_limitation" });
    }
    if !policy.pod_level && !resources::is_same_pod_level(of_pod(desired), of_pod(allocated)) {
        let message = "InPlacePodLevelResourcesVerticalScaling is disabled";
        return Some(Infeasible { message, detail: "plr_feature_gate_off" });
    }
    let requests_differ = |resource| {
        pairs(desired, allocated).any(|(one, other)| compute(one).get(resource).0 != compute(other).get(resource).0)
    };
    let is_guaranteed = class == Class::Guaranteed;
    if is_guaranteed && policy.fixed_cpus && requests_differ(Resizable::Cpu) {
        let message = r#"Resize is infeasible for Guaranteed Pods alongside CPU Manager policy "static""#;
        return Some(Infeasible { message, detail: "guaranteed_pod_cpu_manager_static_policy" });
    }
    if is_guaranteed && policy.fixed_memory && requests_differ(Resizable::Memory) {
        let message = r#"Resize is infeasible for Guaranteed Pods alongside Memory Manager policy "Static""#;
        return Some(Infeasible { message, detail: "guaranteed_pod_memory_manager_static_policy" });
    }
    None
}

fn of_pod(pod: &Pod) -> Option<&k8s_openapi::api::core::v1::ResourceRequirements> {
    pod.spec.as_ref().and_then(|spec| spec.resources.as_ref())
}

fn compute(container: &Container) -> Compute {
    container.resources.as_ref().map(Compute::of).unwrap_or_default()
}

/// The containers of both, by name.
fn pairs<'a>(desired: &'a Pod, allocated: &'a Pod) -> impl Iterator<Item = (&'a Container, &'a Container)> {
    let allocated = spec::lasting_by_name(allocated);
    let pair = move |wanted: spec::SpecContainer<'a>| Some((wanted.spec, allocated.get(wanted.name())?.spec));
    spec::lasting_containers(desired).filter_map(pair)
}

fn changes_memory_of_swapping_container(desired: &Pod, allocated: &Pod, class: Class) -> bool {
    let may_swap = |container: &Container| {
        let of = compute(container);
        class == Class::Burstable && !spec::is_critical(desired) && of.memory_request != of.memory_limit
    };
    pairs(desired, allocated).any(|(wanted, has)| {
        compute(wanted).memory_request != compute(has).memory_request
            && !resources::needs_restart(has, Resizable::Memory)
            && (may_swap(wanted) || may_swap(has))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn pod(resources: Value, policy: Value) -> Pod {
        let container = json!({ "name": "c", "resources": resources, "resizePolicy": policy });
        serde_json::from_value(json!({ "spec": { "containers": [container] } })).expect("a pod")
    }

    fn requests(cpu: &str, memory: &str) -> Value {
        json!({ "requests": { "cpu": cpu, "memory": memory }, "limits": { "memory": "4Gi" } })
    }

    #[test]
    fn swap() {
        let policy = ResizePolicy { limited_swap: true, ..ResizePolicy::default() };
        let judge = |from: Value, to: Value, restart: Value, class| {
            infeasible(&pod(to, restart.clone()), &pod(from, restart), class, policy).map(|it| it.detail)
        };
        let (one, two) = (requests("1", "1Gi"), requests("1", "2Gi"));
        let restart = json!([{ "resourceName": "memory", "restartPolicy": "RestartContainer" }]);
        let not = json!([{ "resourceName": "memory", "restartPolicy": "NotRequired" }]);
        let swaps = Some("swap_limitation");
        assert_eq!(judge(one.clone(), two.clone(), json!([]), Class::Burstable), swaps);
        assert_eq!(judge(one.clone(), two.clone(), not, Class::Burstable), swaps);
        assert_eq!(judge(one.clone(), two.clone(), restart, Class::Burstable), None);
        assert_eq!(judge(one.clone(), two, json!([]), Class::Guaranteed), None, "it has no swap");
        let limit_only = json!({ "requests": { "cpu": "1", "memory": "1Gi" }, "limits": { "memory": "5Gi" } });
        assert_eq!(judge(one.clone(), limit_only, json!([]), Class::Burstable), None);
        assert_eq!(judge(one.clone(), requests("2", "1Gi"), json!([]), Class::Burstable), None);
        // Without swap before and after.
        let (same, doubled) =
            (requests("1", "4Gi"), json!({ "requests": { "memory": "8Gi" }, "limits": { "memory": "8Gi" } }));
        assert_eq!(judge(same, doubled.clone(), json!([]), Class::Burstable), None);
        assert_eq!(judge(one, doubled, json!([]), Class::Burstable), swaps, "it swaps now");
        let critical = |memory: &str| {
            let mut pod = pod(requests("1", memory), json!([]));
            pod.spec.as_mut().expect("a spec").priority = Some(2_000_000_000);
            pod
        };
        let judged = infeasible(&critical("2Gi"), &critical("1Gi"), Class::Burstable, policy);
        assert_eq!(judged, None, "critical pods have no swap");
    }

    #[test]
    fn assigned_resources() {
        let policy = ResizePolicy { fixed_cpus: true, fixed_memory: true, ..ResizePolicy::default() };
        let judge = |to: Value, class| {
            infeasible(&pod(to, json!([])), &pod(requests("1500m", "1Gi"), json!([])), class, policy)
        };
        let cpu = judge(requests("1600m", "1Gi"), Class::Guaranteed).expect("infeasible");
        let message = r#"Resize is infeasible for Guaranteed Pods alongside CPU Manager policy "static""#;
        assert_eq!((cpu.message, cpu.detail), (message, "guaranteed_pod_cpu_manager_static_policy"));
        let memory = judge(requests("1500m", "2Gi"), Class::Guaranteed).expect("infeasible");
        let message = r#"Resize is infeasible for Guaranteed Pods alongside Memory Manager policy "Static""#;
        assert_eq!((memory.message, memory.detail), (message, "guaranteed_pod_memory_manager_static_policy"));
        assert_eq!(judge(requests("1600m", "2Gi"), Class::Burstable), None);
    }

    #[test]
    fn pod_level_resources_need_their_gate() {
        let with = |resources: Value| -> Pod {
            serde_json::from_value(json!({ "spec": { "containers": [], "resources": resources } })).expect("a pod")
        };
        let judge = |pod_level| {
            let policy = ResizePolicy { pod_level, ..ResizePolicy::default() };
            let (from, to) = (with(json!({ "requests": { "cpu": "1" } })), with(json!({ "requests": { "cpu": "2" } })));
            infeasible(&to, &from, Class::Burstable, policy).map(|it| it.message)
        };
        assert_eq!([judge(true), judge(false)], [None, Some("InPlacePodLevelResourcesVerticalScaling is disabled")]);
    }
}
