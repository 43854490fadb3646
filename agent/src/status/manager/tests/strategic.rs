//! Strategic merge as an API server does it for `PodStatus`, written from the field's declared merge keys: the other
//! half of `diff`, for tests alone.

use serde_json::Map;
use serde_json::Value;

/// Applies the `status` part of a patch.
pub(super) fn apply(status: &mut Value, patch: &Value) {
    let status = status.as_object_mut().expect("a status is an object");
    for (key, change) in patch.as_object().expect("a patch is an object") {
        match key.as_str() {
            "conditions" => merge_by(status, key, "type", change),
            "podIPs" | "hostIPs" => merge_by(status, key, "ip", change),
            _ => merge_value(status, key, change),
        }
    }
}

fn merge_value(object: &mut Map<String, Value>, key: &str, change: &Value) {
    match (object.get_mut(key), change) {
        (_, Value::Null) => {
            object.remove(key);
        }
        (Some(Value::Object(old)), Value::Object(new)) => {
            for (key, change) in new {
                merge_value(old, key, change);
            }
        }
        _ => {
            object.insert(key.to_owned(), change.clone());
        }
    }
}

/// Lists of objects with a merge key.
fn merge_by(object: &mut Map<String, Value>, field: &str, key: &str, change: &Value) {
    let Value::Array(changes) = change else {
        assert!(change.is_null(), "{field} must be a list or null");
        object.remove(field);
        return;
    };
    let replaces = changes.iter().any(|change| change["$patch"] == "replace");
    let list = object.entry(field).or_insert_with(|| Value::Array(Vec::new())).as_array_mut().expect("a list");
    if replaces {
        *list = changes.iter().filter(|change| change.get("$patch").is_none()).cloned().collect();
        return;
    }
    for change in changes {
        let known = list.iter().position(|item| item[key] == change[key]);
        match (known, change["$patch"].as_str()) {
            (Some(at), Some("delete")) => {
                list.remove(at);
            }
            (None, Some("delete")) => {}
            (_, Some(other)) => panic!("unknown directive {other}"),
            (Some(at), None) => {
                for (key, change) in change.as_object().expect("an object") {
                    merge_value(list[at].as_object_mut().expect("an object"), key, change);
                }
            }
            (None, None) => {
                assert!(!change[key].is_null(), "{field} without {key}");
                list.push(change.clone());
            }
        }
    }
}
