//! Rejects new pods on a node under pressure, which would have to evict them again. Pure.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Taint;

use super::Decision;
use super::Input;
use super::taints;
use crate::model::Pressures;
use crate::model::spec;

const MEMORY_TAINT: &str = "node.kubernetes.io/memory-pressure";

pub(super) fn check(input: Input<'_>) -> Decision {
    let pressures = input.node.pressures;
    if input.is_resumed || pressures == Pressures::default() || spec::is_critical(input.pod) {
        return Decision::Admit;
    }
    let only_memory = pressures == Pressures { memory: true, ..Pressures::default() };
    if only_memory && (!input.best_effort || tolerates_memory_pressure(input.pod)) {
        return Decision::Admit;
    }
    Decision::reject("Evicted", format!("The node had condition: [{}]. ", pressures.conditions().join(" ")))
}

fn tolerates_memory_pressure(pod: &Pod) -> bool {
    let taint = Taint { key: MEMORY_TAINT.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() };
    taints::tolerates(pod, &taint)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::super::NodeOffer;
    use super::super::Rejection;
    use super::super::testing;
    use super::*;

    const MEMORY: Pressures = Pressures { memory: true, disk: false, pid: false };
    const DISK: Pressures = Pressures { memory: false, disk: true, pid: false };
    const ALL: Pressures = Pressures { memory: true, disk: true, pid: true };

    fn message(pressures: Pressures, best_effort: bool, annotations: Value, spec: &Value) -> Option<String> {
        let pod = json!({"metadata": {"annotations": annotations}, "spec": spec});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let node = NodeOffer { pressures, ..NodeOffer::default() };
        match check(Input { best_effort, ..testing::input(&pod, &node) }) {
            Decision::Admit => None,
            Decision::Reject(Rejection { reason, message }) => {
                assert_eq!(reason, "Evicted");
                Some(message)
            }
        }
    }

    #[test]
    fn pressure_rejects_pods_by_class_and_resource() {
        let plain = json!({"containers": []});
        let of = |pressures, best_effort| message(pressures, best_effort, json!({}), &plain);
        assert_eq!(of(Pressures::default(), true), None);
        assert_eq!(of(MEMORY, true).as_deref(), Some("The node had condition: [MemoryPressure]. "));
        assert_eq!(of(MEMORY, false), None, "it has requests");
        assert_eq!(of(DISK, false).as_deref(), Some("The node had condition: [DiskPressure]. "));
        let all = "The node had condition: [MemoryPressure DiskPressure PIDPressure]. ";
        assert_eq!(of(ALL, false).as_deref(), Some(all));
    }

    #[test]
    fn critical_pods_are_admitted() {
        let critical = json!({"containers": [], "priority": 2_000_000_000});
        let high = json!({"containers": [], "priority": 1_999_999_999});
        assert_eq!(message(ALL, true, json!({}), &critical), None);
        assert!(message(ALL, true, json!({}), &high).is_some());
        let plain = json!({"containers": []});
        assert_eq!(message(ALL, true, json!({"kubernetes.io/config.source": "file"}), &plain), None);
        assert_eq!(message(ALL, true, json!({"kubernetes.io/config.mirror": "hash"}), &plain), None);
        assert!(message(ALL, true, json!({"kubernetes.io/config.source": "api"}), &plain).is_some());
    }

    #[test]
    fn tolerations_count_for_memory_alone() {
        let key = MEMORY_TAINT;
        for (toleration, tolerated) in [
            (json!({"key": key, "operator": "Exists"}), true),
            (json!({"key": key, "operator": "Exists", "effect": "NoSchedule"}), true),
            (json!({"key": key, "effect": "NoSchedule"}), true),
            (json!({"operator": "Exists"}), true),
            (json!({"key": key, "operator": "Exists", "effect": "NoExecute"}), false),
            (json!({"key": key, "operator": "Equal", "value": "x"}), false),
            (json!({"key": "other", "operator": "Exists"}), false),
        ] {
            let spec = json!({"containers": [], "tolerations": [toleration]});
            assert_eq!(message(MEMORY, true, json!({}), &spec).is_none(), tolerated, "{toleration}");
            assert!(message(DISK, true, json!({}), &spec).is_some(), "{toleration}");
        }
    }
}
