use serde_json::Map;
use serde_json::Value;

use super::samples::RECORDING;
use super::*;

const JSON_SCHEMA: &str = include_str!("../../../../docs/observe.schema.json");

/// Checks a value against the keywords that the schema uses; panics at others, which it would have to ignore.
fn check(schema: &Value, root: &Value, value: &Value, path: &str) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("{path}: {what}: {value}"));
    for (keyword, rule) in schema.as_object().expect("a schema is an object") {
        match keyword.as_str() {
            "$schema" | "$id" | "$defs" | "title" | "description" => {}
            "$ref" => {
                let pointer = rule.as_str().and_then(|text| text.strip_prefix('#')).expect("a local reference");
                check(root.pointer(pointer).expect(pointer), root, value, path)?;
            }
            "type" if !is_type(rule.as_str().expect("one type"), value) => {
                return wrong(&format!("not of type {rule}"));
            }
            "type" => {}
            "const" if rule != value => return wrong(&format!("not {rule}")),
            "const" => {}
            "enum" if !rule.as_array().expect("a list").contains(value) => return wrong(&format!("not in {rule}")),
            "enum" => {}
            "minimum" if value.as_f64() < rule.as_f64() => return wrong("too small"),
            "minimum" => {}
            "format" => assert_eq!(rule, "date-time"),
            "items" => {
                for (index, item) in value.as_array().into_iter().flatten().enumerate() {
                    check(rule, root, item, &format!("{path}/{index}"))?;
                }
            }
            "required" => {
                let required = rule.as_array().expect("a list").iter().map(|name| name.as_str().expect("a name"));
                if let Some(name) = required.into_iter().find(|name| value.get(name).is_none()) {
                    return wrong(&format!("{name} is missing"));
                }
            }
            "properties" => {
                for (name, schema) in rule.as_object().expect("properties") {
                    if let Some(value) = value.get(name) {
                        check(schema, root, value, &format!("{path}/{name}"))?;
                    }
                }
            }
            "oneOf" => {
                let all = rule.as_array().expect("a list");
                let errors: Vec<String> = all.iter().filter_map(|one| check(one, root, value, path).err()).collect();
                if all.len() - errors.len() != 1 {
                    return Err(format!("{path}: not exactly one of: {}", errors.join("; ")));
                }
            }
            other => panic!("{path}: the keyword {other} is not checked"),
        }
    }
    Ok(())
}

fn is_type(name: &str, value: &Value) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        other => panic!("unknown type {other}"),
    }
}

fn schema() -> Value {
    serde_json::from_str(JSON_SCHEMA).expect("the schema is JSON")
}

/// The schema of the records of a kind.
fn of_kind<'a>(schema: &'a Value, kind: &str) -> &'a Value {
    let all = schema["oneOf"].as_array().expect("a list of kinds");
    let pointer = |one: &'a Value| schema.pointer(one["$ref"].as_str().expect("a reference").trim_start_matches('#'));
    let found = all.iter().filter_map(pointer).find(|one| one["properties"]["kind"]["const"] == kind);
    found.unwrap_or_else(|| panic!("{kind} has no schema"))
}

fn documented(properties: &Value, root: &Value, value: &Map<String, Value>, path: &str) {
    for (name, value) in value {
        let schema = properties.get(name).unwrap_or_else(|| panic!("{path}/{name} is not in the schema"));
        let schema = match schema["$ref"].as_str() {
            Some(pointer) => root.pointer(pointer.trim_start_matches('#')).expect("it exists"),
            None => schema,
        };
        let path = format!("{path}/{name}");
        match value {
            Value::Object(value) => documented(&schema["properties"], root, value, &path),
            Value::Array(values) => {
                let item = &schema["items"];
                let item =
                    item["$ref"].as_str().and_then(|at| root.pointer(at.trim_start_matches('#'))).unwrap_or(item);
                let objects = values.iter().filter_map(Value::as_object);
                objects.for_each(|value| documented(&item["properties"], root, value, &path));
            }
            _ => {}
        }
    }
}

#[test]
fn every_kind_of_record_agrees_with_the_schema() {
    let schema = schema();
    let mut kinds = std::collections::BTreeSet::new();
    for (number, text) in RECORDING.lines().enumerate() {
        let line: Line = serde_json::from_str(text).unwrap_or_else(|error| panic!("line {}: {error}", number + 1));
        let written = serde_json::to_value(&line).unwrap();
        assert_eq!(written, serde_json::from_str::<Value>(text).unwrap(), "line {} does not come back", number + 1);
        check(&schema, &schema, &written, "").unwrap_or_else(|error| panic!("line {}: {error}", number + 1));
        let kind = written["kind"].as_str().unwrap().to_owned();
        documented(&of_kind(&schema, &kind)["properties"], &schema, written.as_object().unwrap(), &kind);
        kinds.insert(kind);
    }
    let expected: std::collections::BTreeSet<String> = Record::KINDS.map(str::to_owned).into();
    assert_eq!(kinds, expected, "the recording has every kind");
    assert_eq!(schema["oneOf"].as_array().unwrap().len(), Record::KINDS.len());
}

#[test]
fn the_schema_rejects_what_is_wrong() {
    let schema = schema();
    let text = RECORDING.lines().find(|line| line.contains("\"kind\":\"oom\"")).unwrap();
    let good: Value = serde_json::from_str(text).unwrap();
    let wrong = |pointer: &str, value: Value| {
        let mut changed = good.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        check(&schema, &schema, &changed, "").unwrap_err()
    };
    wrong("/schema", "keblet.dev/observe/v2".into());
    wrong("/victim", "unknown-victim".into());
    wrong("/kills", (-1).into());
    wrong("/pod", "shop/cart".into());
    let mut without = good.clone();
    without.as_object_mut().unwrap().remove("scope");
    check(&schema, &schema, &without, "").unwrap_err();
}

#[test]
fn spellings_of_enumerations_are_those_of_labels() {
    let json = |value: &dyn erased::Json| value.json();
    for victim in [Victim::Main, Victim::Child, Victim::Exec, Victim::Other, Victim::Unknown] {
        assert_eq!(json(&victim), victim.as_str());
    }
    let scopes = [Scope::Container, Scope::Pod, Scope::QosClass, Scope::NodeAllocatable, Scope::OtherCgroup];
    for scope in scopes.into_iter().chain([Scope::Node, Scope::Unknown]) {
        assert_eq!(json(&scope), scope.as_str());
    }
    for confidence in [Confidence::Kernel, Confidence::Counter, Confidence::Log, Confidence::Runtime] {
        assert_eq!(json(&confidence), confidence.as_str());
    }
    for cause in [StallCause::OwnLimit, StallCause::Itself, StallCause::OtherPod, StallCause::Unknown] {
        assert_eq!(json(&cause), cause.as_str());
    }
    for resource in Resource::ALL {
        assert_eq!(json(&resource), resource.as_str());
    }
    for state in [RunState::Created, RunState::Running, RunState::Exited, RunState::Unknown] {
        assert_eq!(json(&state), state.as_str());
    }
}

mod erased {
    /// A value that is a string in JSON.
    pub(super) trait Json {
        fn json(&self) -> String;
    }

    impl<T: serde::Serialize> Json for T {
        fn json(&self) -> String {
            let value = serde_json::to_value(self).expect("JSON");
            value.as_str().expect("a string").to_owned()
        }
    }
}
