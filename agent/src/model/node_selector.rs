//! Node selectors (`NodeSelector`): of the node affinity of pods and of persistent volumes. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::api::core::v1::NodeSelectorRequirement;
use k8s_openapi::api::core::v1::NodeSelectorTerm;

use super::labels;

/// The only field that `matchFields` supports.
const NAME_FIELD: &str = "metadata.name";

/// The node with this name and these labels meets all requirements of a term. A term without requirements, and a malformed
/// requirement, is met by no node.
pub(crate) fn matches(selector: &NodeSelector, name: &str, labels: &BTreeMap<String, String>) -> bool {
    selector.node_selector_terms.iter().any(|term| meets(term, name, labels))
}

fn meets(term: &NodeSelectorTerm, name: &str, labels: &BTreeMap<String, String>) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let of_fields = term.match_fields.as_deref().unwrap_or_default();
    let is_empty = expressions.is_empty() && of_fields.is_empty();
    let field_is_met = |requirement: &NodeSelectorRequirement| {
        let is_known = requirement.key == NAME_FIELD && matches!(requirement.operator.as_str(), "In" | "NotIn");
        is_known && requirement.values.iter().flatten().count() == 1 && is_met(requirement, Some(name))
    };
    let label = |key: &str| labels.get(key).map(String::as_str);
    let label_is_met = |requirement: &NodeSelectorRequirement| {
        is_of_labels(requirement) && is_met(requirement, label(&requirement.key))
    };
    !is_empty && expressions.iter().all(label_is_met) && of_fields.iter().all(field_is_met)
}

/// A label can have this key and these values. The API server accepts others in updates of pods that have them already, and
/// every label would meet a `NotIn` with them.
fn is_of_labels(requirement: &NodeSelectorRequirement) -> bool {
    labels::is_key(&requirement.key) && requirement.values.iter().flatten().all(|value| labels::is_value(value))
}

fn is_met(requirement: &NodeSelectorRequirement, held: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let among = |held: &str| values.iter().any(|value| value == held);
    let compares = |by: fn(&i64, &i64) -> bool| match (held.and_then(|held| held.parse().ok()), values) {
        (Some(held), [limit]) => limit.parse().is_ok_and(|limit| by(&held, &limit)),
        _ => false,
    };
    match requirement.operator.as_str() {
        "In" => held.is_some_and(among),
        "NotIn" => !values.is_empty() && !held.is_some_and(among),
        "Exists" => values.is_empty() && held.is_some(),
        "DoesNotExist" => values.is_empty() && held.is_none(),
        "Gt" => compares(i64::gt),
        "Lt" => compares(i64::lt),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn selects(terms: Value) -> bool {
        let selector: NodeSelector = serde_json::from_value(json!({"nodeSelectorTerms": terms})).expect("a selector");
        matches(&selector, "n1", &[("zone".to_owned(), "a".to_owned()), ("cpus".to_owned(), "8".to_owned())].into())
    }

    fn expression(key: &str, operator: &str, values: &[&str]) -> Value {
        json!({"key": key, "operator": operator, "values": values})
    }

    #[test]
    fn operators() {
        for (key, operator, values, expected) in [
            ("zone", "In", &["b", "a"][..], true),
            ("zone", "In", &["b"], false),
            ("rack", "In", &["b"], false),
            ("zone", "NotIn", &["b"], true),
            ("zone", "NotIn", &["a"], false),
            ("rack", "NotIn", &["a"], true),
            ("zone", "Exists", &[], true),
            ("rack", "Exists", &[], false),
            ("rack", "DoesNotExist", &[], true),
            ("zone", "DoesNotExist", &[], false),
            ("cpus", "Gt", &["4"], true),
            ("cpus", "Gt", &["8"], false),
            ("cpus", "Lt", &["9"], true),
            ("zone", "Gt", &["4"], false),
            ("cpus", "Gt", &["4", "5"], false),
            ("zone", "Near", &["a"], false),
            ("zone", "NotIn", &["invalid value: ___@#$%^"], false),
            ("zone", "NotIn", &["b", "-b"], false),
            ("a rack", "NotIn", &["b"], false),
            ("a rack", "DoesNotExist", &[], false),
            ("example.com/rack", "DoesNotExist", &[], true),
            ("cpus", "Gt", &["-1"], false),
        ] {
            let found = selects(json!([{"matchExpressions": [expression(key, operator, values)]}]));
            assert_eq!(found, expected, "{key} {operator} {values:?}");
        }
    }

    #[test]
    fn any_term_with_all_its_requirements() {
        let (yes, no) = (expression("zone", "In", &["a"]), expression("zone", "In", &["b"]));
        assert!(selects(json!([{"matchExpressions": [no]}, {"matchExpressions": [yes]}])));
        assert!(!selects(json!([{"matchExpressions": [yes, no]}])));
        assert!(!selects(json!([])) && !selects(json!([{}])), "nothing selects nothing");
        let named = |name: &str| json!({"key": "metadata.name", "operator": "In", "values": [name]});
        assert!(selects(json!([{"matchFields": [named("n1")], "matchExpressions": [yes]}])));
        assert!(!selects(json!([{"matchFields": [named("n2")]}])));
        assert!(!selects(json!([{"matchFields": [{"key": "spec.podCIDR", "operator": "Exists"}]}])));
    }
}
