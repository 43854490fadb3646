//! Taints that pods must tolerate. Pure.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Taint;
use k8s_openapi::api::core::v1::Toleration;

/// The pod tolerates every taint of this effect.
pub(super) fn tolerates_all(pod: &Pod, taints: &[Taint], effect: &str) -> bool {
    taints.iter().filter(|taint| taint.effect == effect).all(|taint| tolerates(pod, taint))
}

/// A toleration of the pod matches the taint.
pub(super) fn tolerates(pod: &Pod, taint: &Taint) -> bool {
    let mut tolerations = pod.spec.iter().flat_map(|spec| spec.tolerations.iter().flatten());
    tolerations.any(|toleration| matches(toleration, taint))
}

/// Without effect it matches every effect, without key every key.
fn matches(toleration: &Toleration, taint: &Taint) -> bool {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    let (key, effect) = (text(&toleration.key), text(&toleration.effect));
    let is_of_effect = effect.is_empty() || effect == taint.effect;
    let is_of_key = key.is_empty() || key == taint.key;
    match text(&toleration.operator).as_str() {
        "Exists" => is_of_effect && is_of_key,
        "" | "Equal" => is_of_effect && is_of_key && text(&toleration.value) == text(&taint.value),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    #[test]
    fn tolerations_match_by_key_value_and_effect() {
        let taint = |value: Value| -> Taint { serde_json::from_value(value).expect("a taint") };
        let maintenance = taint(json!({ "key": "maintenance", "value": "now", "effect": "NoExecute" }));
        let other = taint(json!({ "key": "other", "effect": "NoSchedule" }));
        for (toleration, tolerated) in [
            (json!({ "operator": "Exists" }), true),
            (json!({ "operator": "Exists", "effect": "NoExecute" }), true),
            (json!({ "operator": "Exists", "effect": "NoSchedule" }), false),
            (json!({ "key": "maintenance", "operator": "Exists" }), true),
            (json!({ "key": "other", "operator": "Exists" }), false),
            (json!({ "key": "maintenance", "value": "now" }), true),
            (json!({ "key": "maintenance", "operator": "Equal", "value": "now", "effect": "NoExecute" }), true),
            (json!({ "key": "maintenance", "value": "later" }), false),
            (json!({ "operator": "Equal", "value": "now" }), true),
            (json!({ "operator": "Equal", "value": "later" }), false),
            (json!({ "key": "maintenance", "operator": "Gt", "value": "now" }), false),
        ] {
            let spec = json!({ "containers": [], "tolerations": [toleration] });
            let pod: Pod = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).expect("a pod");
            let taints = [maintenance.clone(), other.clone()];
            assert_eq!(tolerates_all(&pod, &taints, "NoExecute"), tolerated, "{toleration}");
        }
        assert!(tolerates_all(&Pod::default(), &[other], "NoExecute"), "it does not forbid to run");
        let tolerations = json!([{ "key": "maintenance", "operator": "Exists" }]);
        let spec = json!({ "containers": [], "tolerations": tolerations });
        let pod: Pod = serde_json::from_value(json!({ "metadata": {}, "spec": spec })).expect("a pod");
        let second = taint(json!({ "key": "second", "effect": "NoExecute" }));
        assert!(!tolerates_all(&pod, &[maintenance, second], "NoExecute"), "one of two");
    }
}
