//! `spec.nodeSelector` and the required node affinity against a node's labels and name. Pure.

use k8s_openapi::api::core::v1::Pod;

use super::NodeInfo;
use crate::model::node_selector;

/// The pod may run on this node. A requirement that is malformed is met by no node.
pub(super) fn matches(pod: &Pod, node: &NodeInfo) -> bool {
    let Some(spec) = &pod.spec else { return true };
    let selected = spec.node_selector.iter().flatten().all(|(key, value)| node.labels.get(key) == Some(value));
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    selected && required.is_none_or(|required| node_selector::matches(required, &node.name, &node.labels))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn node() -> NodeInfo {
        let labels = [("zone", "a"), ("cpus", "8")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        NodeInfo { name: "n1".to_owned(), labels: labels.into(), ..NodeInfo::unlimited() }
    }

    fn admits(spec: Value) -> bool {
        let mut spec = spec;
        spec["containers"] = json!([]);
        matches(&serde_json::from_value(json!({ "metadata": {}, "spec": spec })).expect("a pod"), &node())
    }

    fn required(terms: Value) -> Value {
        let required = json!({ "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms } });
        json!({ "affinity": { "nodeAffinity": required } })
    }

    #[test]
    fn the_selector_needs_every_label() {
        assert!(admits(json!({})));
        assert!(admits(json!({ "nodeSelector": { "zone": "a", "cpus": "8" } })));
        assert!(!admits(json!({ "nodeSelector": { "zone": "a", "gpu": "" } })));
        assert!(!admits(json!({ "nodeSelector": { "zone": "b" } })));
    }

    #[test]
    fn every_operator() {
        for (operator, key, values, admitted) in [
            ("In", "zone", json!(["b", "a"]), true),
            ("In", "zone", json!(["b"]), false),
            ("In", "gpu", json!(["a"]), false),
            ("NotIn", "zone", json!(["b"]), true),
            ("NotIn", "zone", json!(["a"]), false),
            ("NotIn", "gpu", json!(["a"]), true),
            ("NotIn", "gpu", json!([]), false),
            ("Exists", "zone", json!([]), true),
            ("Exists", "gpu", json!([]), false),
            ("Exists", "zone", json!(["a"]), false),
            ("DoesNotExist", "gpu", json!([]), true),
            ("DoesNotExist", "zone", json!([]), false),
            ("Gt", "cpus", json!(["7"]), true),
            ("Gt", "cpus", json!(["8"]), false),
            ("Gt", "zone", json!(["7"]), false),
            ("Gt", "cpus", json!(["many"]), false),
            ("Gt", "cpus", json!(["1", "2"]), false),
            ("Lt", "cpus", json!(["9"]), true),
            ("Lt", "cpus", json!(["8"]), false),
            ("Near", "zone", json!(["a"]), false),
        ] {
            let expression = json!({ "key": key, "operator": operator, "values": values });
            let terms = json!([{ "matchExpressions": [expression] }]);
            assert_eq!(admits(required(terms)), admitted, "{expression}");
        }
    }

    #[test]
    fn one_term_suffices_and_an_empty_one_does_not() {
        let of =
            |operator: &str, key: &str, values: Value| json!({ "key": key, "operator": operator, "values": values });
        let no = json!({ "matchExpressions": [of("In", "zone", json!(["b"]))] });
        let yes = json!({ "matchExpressions": [of("In", "zone", json!(["a"])), of("Exists", "cpus", json!([]))] });
        assert!(admits(required(json!([no, yes]))));
        assert!(!admits(required(json!([no]))));
        assert!(!admits(required(json!([{}]))));
        assert!(!admits(required(json!([]))));
    }

    #[test]
    fn fields_match_the_name_of_the_node() {
        for (field, admitted) in [
            (json!({ "key": "metadata.name", "operator": "In", "values": ["n1"] }), true),
            (json!({ "key": "metadata.name", "operator": "In", "values": ["n2"] }), false),
            (json!({ "key": "metadata.name", "operator": "NotIn", "values": ["n2"] }), true),
            (json!({ "key": "metadata.name", "operator": "In", "values": ["n1", "n2"] }), false),
            (json!({ "key": "metadata.name", "operator": "Exists" }), false),
            (json!({ "key": "metadata.uid", "operator": "In", "values": ["n1"] }), false),
        ] {
            assert_eq!(admits(required(json!([{ "matchFields": [field] }]))), admitted, "{field}");
        }
    }
}
