//! The smallest strategic merge patch from one pod status to another. Pure.
//!
//! Follows the merge keys that the API declares for `PodStatus`: conditions merge by `type`; addresses have a key too, but
//! their order matters, so that a changed list is replaced; container statuses have none and are replaced anyway.

use k8s_openapi::api::core::v1::PodStatus;
use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use crate::model::Amount;

/// Lists with a merge key whose order is significant.
const ORDERED: [&str; 2] = ["hostIPs", "podIPs"];
/// Maps of quantities: `500m` and `0.5` are the same there.
const QUANTITIES: [&str; 3] = ["allocatedResources", "limits", "requests"];

/// The body of the patch, for the pod with this UID only; `None` if nothing differs.
pub(super) fn patch(uid: &str, from: &PodStatus, to: &PodStatus) -> Option<Value> {
    let (from, to) = (fields(from), fields(to));
    let mut changes = Map::new();
    for key in keys(&from, &to) {
        let (before, after) = (from.get(key), to.get(key));
        if key == "conditions" {
            let list = conditions(before, after);
            changes.extend((!list.is_empty()).then(|| (key.clone(), Value::Array(list))));
        } else if !same(key, before, after) {
            changes.insert(key.clone(), change(key, before, after));
        }
    }
    (!changes.is_empty()).then(|| json!({"metadata": {"uid": uid}, "status": changes}))
}

/// True if the patch only changes `observedGeneration`.
pub(super) fn only_observes(patch: &Value) -> bool {
    let fields = patch["status"].as_object();
    let observes = |change: &Value| {
        change.as_object().is_some_and(|fields| fields.keys().all(|key| key == "type" || key == "observedGeneration"))
    };
    fields.into_iter().flatten().all(|(key, change)| match key.as_str() {
        "observedGeneration" => true,
        "conditions" => change.as_array().is_some_and(|changes| changes.iter().all(observes)),
        _ => false,
    })
}

fn change(key: &str, before: Option<&Value>, after: Option<&Value>) -> Value {
    match after {
        None => Value::Null,
        Some(Value::Array(after)) if ORDERED.contains(&key) => {
            after.iter().cloned().chain([json!({"$patch": "replace"})]).collect()
        }
        Some(after) => object_or_value(before, after),
    }
}

fn fields(status: &PodStatus) -> Map<String, Value> {
    // A status has string keys and no numbers JSON lacks: it can always be written.
    match serde_json::to_value(status) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    }
}

fn keys<'a>(from: &'a Map<String, Value>, to: &'a Map<String, Value>) -> impl Iterator<Item = &'a String> {
    to.keys().chain(from.keys().filter(|key| !to.contains_key(*key)))
}

/// Changed fields of an object; any other value whole.
fn object_or_value(before: Option<&Value>, after: &Value) -> Value {
    let (Some(Value::Object(before)), Value::Object(after)) = (before, after) else { return after.clone() };
    let mut changes = Map::new();
    for key in keys(before, after) {
        let (old, new) = (before.get(key), after.get(key));
        if !same(key, old, new) {
            changes.insert(key.clone(), new.map_or(Value::Null, |new| object_or_value(old, new)));
        }
    }
    Value::Object(changes)
}

/// Conditions by type, whatever their order: new ones whole, changed ones by field, dropped ones by directive.
fn conditions(before: Option<&Value>, after: Option<&Value>) -> Vec<Value> {
    let list = |value: Option<&Value>| value.and_then(Value::as_array).cloned().unwrap_or_default();
    let (before, after) = (list(before), list(after));
    let of_type = |list: &[Value], wanted: &Value| list.iter().find(|c| c["type"] == wanted["type"]).cloned();
    let mut changes = Vec::new();
    for condition in &after {
        let old = of_type(&before, condition);
        if same("conditions", old.as_ref(), Some(condition)) {
            continue;
        }
        let mut change = object_or_value(old.as_ref(), condition);
        change["type"] = condition["type"].clone();
        changes.push(change);
    }
    let dropped = before.iter().filter(|condition| of_type(&after, condition).is_none());
    changes.extend(dropped.map(|condition| json!({"$patch": "delete", "type": condition["type"]})));
    changes
}

/// Equal as far as the API distinguishes: empty and absent are the same.
fn same(key: &str, a: Option<&Value>, b: Option<&Value>) -> bool {
    let given = |value: Option<&Value>| value.is_some_and(|value| !is_empty(value));
    match (a, b) {
        (Some(Value::Object(a)), Some(Value::Object(b))) => keys(a, b).all(|inner| {
            let (a, b) = (a.get(inner), b.get(inner));
            same(inner, a, b) || (QUANTITIES.contains(&key) && same_quantity(a, b))
        }),
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(key, Some(a), Some(b)))
        }
        (Some(a), Some(b)) if a == b => true,
        (a, b) => !given(a) && !given(b),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.values().all(is_empty),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

fn same_quantity(a: Option<&Value>, b: Option<&Value>) -> bool {
    let amount = |value: Option<&Value>| value?.as_str()?.parse::<Amount>().ok();
    amount(a).zip(amount(b)).is_some_and(|(a, b)| a == b)
}
