//! The difference of two Nodes as a strategic merge patch of the subresource `status`. Pure.
//!
//! Conditions merge by their type; addresses cannot be merged (their key is not unique) and are replaced whole.

use k8s_openapi::api::core::v1::Node;
use serde_json::Map;
use serde_json::Value;
use serde_json::json;

/// The patch from `old` to `new`; `None` if they are equal. The spec is not patched: a kubelet does not own it.
pub(super) fn between(old: &Node, new: &Node) -> Option<Value> {
    let mut patch = Map::new();
    let mut metadata = Map::new();
    for (field, old, new) in [
        ("labels", &old.metadata.labels, &new.metadata.labels),
        ("annotations", &old.metadata.annotations, &new.metadata.annotations),
    ] {
        metadata.extend(difference(&json!(old), &json!(new)).map(|value| (field.to_owned(), value)));
    }
    if !metadata.is_empty() {
        patch.insert("metadata".to_owned(), Value::Object(metadata));
    }
    if let Some(status) = of_status(&json!(old.status), &json!(new.status)) {
        patch.insert("status".to_owned(), status);
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// The part of the patch below `status`, from one status to another; `None` if they are equal.
pub(super) fn of_status(old: &Value, new: &Value) -> Option<Value> {
    let (mut old, mut new) = (object(old), object(new));
    let mut take = |field: &str| (list(old.remove(field)), list(new.remove(field)));
    let (conditions, addresses) = (take("conditions"), take("addresses"));
    let mut patch = match difference(&Value::Object(old), &Value::Object(new)) {
        Some(Value::Object(fields)) => fields,
        _ => Map::new(),
    };
    let conditions = by_type(&conditions.0, &conditions.1);
    if !conditions.is_empty() {
        patch.insert("conditions".to_owned(), Value::Array(conditions));
    }
    if addresses.0 != addresses.1 {
        let replaces = (!addresses.0.is_empty()).then(|| json!({ "$patch": "replace" }));
        let list = addresses.1.into_iter().chain(replaces).collect();
        patch.insert("addresses".to_owned(), Value::Array(list));
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

fn object(value: &Value) -> Map<String, Value> {
    value.as_object().cloned().unwrap_or_default()
}

fn list(value: Option<Value>) -> Vec<Value> {
    match value {
        Some(Value::Array(items)) => items,
        _ => Vec::new(),
    }
}

/// Changed and new entries, each with its type; removed entries are deleted.
fn by_type(old: &[Value], new: &[Value]) -> Vec<Value> {
    let find = |list: &[Value], type_: &Value| list.iter().find(|entry| entry.get("type") == Some(type_)).cloned();
    let changed = new.iter().filter_map(|entry| {
        let type_ = entry.get("type")?;
        match find(old, type_) {
            None => Some(entry.clone()),
            Some(before) => difference(&before, entry).map(|mut change| {
                change["type"] = type_.clone();
                change
            }),
        }
    });
    let gone = old.iter().filter_map(|entry| entry.get("type")).filter(|type_| find(new, type_).is_none());
    changed.chain(gone.map(|type_| json!({ "$patch": "delete", "type": type_ }))).collect()
}

/// A merge of objects field by field; anything else is replaced. `None` if there is no difference.
fn difference(old: &Value, new: &Value) -> Option<Value> {
    if old == new {
        return None;
    }
    let (Value::Object(before), Value::Object(after)) = (old, new) else { return Some(new.clone()) };
    let mut patch: Map<String, Value> =
        before.keys().filter(|field| !after.contains_key(*field)).map(|field| (field.clone(), Value::Null)).collect();
    for (field, value) in after {
        let change = difference(before.get(field).unwrap_or(&Value::Null), value);
        patch.extend(change.map(|change| (field.clone(), change)));
    }
    Some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn node(value: Value) -> Node {
        serde_json::from_value(value).expect("a node")
    }

    fn patch(old: Value, new: Value) -> Option<Value> {
        between(&node(old), &node(new))
    }

    #[test]
    fn nothing_changed_is_no_patch() {
        let same = json!({ "metadata": { "labels": { "a": "b" } }, "status": { "phase": "x", "conditions": [{ "type": "Ready", "status": "True" }] } });
        assert_eq!(patch(same.clone(), same), None);
    }

    #[test]
    fn the_spec_is_not_touched() {
        let spec =
            |key: &str| json!({ "metadata": {}, "spec": { "taints": [{ "key": key, "effect": "NoSchedule" }] } });
        assert_eq!(patch(spec("a"), spec("b")), None);
    }

    #[test]
    fn maps_merge_and_lists_replace() {
        let old = json!({ "metadata": { "labels": { "a": "1", "b": "2" } }, "status": { "capacity": { "cpu": "1", "x": "1" }, "volumesInUse": ["v"] } });
        let new = json!({ "metadata": { "labels": { "a": "1", "c": "3" } }, "status": { "capacity": { "cpu": "2" }, "volumesInUse": ["v", "w"] } });
        let expected = json!({
            "metadata": { "labels": { "b": null, "c": "3" } },
            "status": { "capacity": { "cpu": "2", "x": null }, "volumesInUse": ["v", "w"] },
        });
        assert_eq!(patch(old, new), Some(expected));
    }

    #[test]
    fn conditions_merge_by_type() {
        let old = json!({ "metadata": {}, "status": { "conditions": [
            { "type": "A", "status": "True", "reason": "r" },
            { "type": "B", "status": "True" },
        ] } });
        let new = json!({ "metadata": {}, "status": { "conditions": [
            { "type": "C", "status": "False" },
            { "type": "A", "status": "False", "reason": "r" },
        ] } });
        let expected = json!({ "status": { "conditions": [
            { "type": "C", "status": "False" },
            { "type": "A", "status": "False" },
            { "$patch": "delete", "type": "B" },
        ] } });
        assert_eq!(patch(old, new), Some(expected));
    }

    #[test]
    fn addresses_are_replaced_whole() {
        let with = |ips: &[&str]| {
            let list: Vec<_> = ips.iter().map(|ip| json!({ "type": "InternalIP", "address": ip })).collect();
            json!({ "metadata": {}, "status": { "addresses": list } })
        };
        let entry = |ip: &str| json!({ "type": "InternalIP", "address": ip });
        assert_eq!(
            patch(with(&[]), with(&["1.2.3.4"])),
            Some(json!({ "status": { "addresses": [entry("1.2.3.4")] } }))
        );
        let expected = json!({ "status": { "addresses": [entry("1.2.3.4"), entry("::2"), { "$patch": "replace" }] } });
        assert_eq!(patch(with(&["1.2.3.4"]), with(&["1.2.3.4", "::2"])), Some(expected));
    }

    /// What a server does with such a patch of maps.
    fn merge(target: &mut Value, patch: &Value) {
        let Value::Object(fields) = patch else { return *target = patch.clone() };
        if !target.is_object() {
            *target = json!({});
        }
        for (field, value) in fields {
            if value.is_null() {
                target.as_object_mut().expect("an object").remove(field);
            } else {
                merge(&mut target[field], value);
            }
        }
    }

    proptest! {
        /// Applied to the old labels and capacity, the patch yields the new ones.
        #[test]
        fn patches_lead_from_old_to_new(
            old in prop::collection::btree_map("[a-c]", "[xy]", 0..3), new in prop::collection::btree_map("[a-c]", "[xy]", 0..3),
        ) {
            let of = |map: &std::collections::BTreeMap<String, String>| node(json!({
                "metadata": { "labels": map }, "status": { "capacity": map },
            }));
            let mut merged = json!(of(&old));
            if let Some(patch) = between(&of(&old), &of(&new)) {
                merge(&mut merged, &patch);
            }
            let wanted = json!(of(&new));
            for path in ["/metadata/labels", "/status/capacity"] {
                let filled = |v: &Value| v.pointer(path).and_then(Value::as_object).cloned().unwrap_or_default();
                prop_assert_eq!(filled(&merged), filled(&wanted));
            }
        }
    }
}
