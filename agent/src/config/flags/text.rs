//! From the text of a flag to a value, one function per form.

use std::net::IpAddr;

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::table::Kind;
use crate::config::duration::GoDuration;
use crate::model::Amount;

/// Reads one occurrence of a flag.
///
/// # Errors
/// The text is not a value of this kind.
pub(super) fn read(kind: Kind, text: &str) -> Result<Value, String> {
    match kind {
        Kind::Bool => boolean(text).map(Value::Bool),
        Kind::Int => integer(text).map(Value::from),
        Kind::Verbosity => verbosity(text).map(Value::from),
        Kind::Text => Ok(text.into()),
        Kind::Ip => checked::<IpAddr>(text, || format!("{text:?} is not an IP address")),
        Kind::Duration => text.parse::<GoDuration>().map(|_| text.into()).map_err(|error| error.to_string()),
        Kind::Quantity => text.parse::<Amount>().map(|_| text.into()).map_err(|error| error.to_string()),
        Kind::List => Ok(parts(text).map(Value::from).collect()),
        Kind::Map => pairs(text, '=', |value| Ok(value.into())),
        Kind::Labels => Ok(labels(text)),
        Kind::Options => pair(text, '=').map(|(key, value)| json!({ key: value })),
        Kind::Switches => pairs(text, '=', |value| boolean(value).map(Value::Bool)),
        Kind::Thresholds => pairs(text, '<', |value| Ok(value.into())),
        Kind::Headers => headers(text),
        Kind::ReservedMemory => parts_at(text, ';').map(reserved_memory).collect(),
        Kind::Taints => taints(text),
        Kind::VModule => parts(text).map(vmodule).collect(),
    }
}

/// Adds a further occurrence: lists and maps grow, anything else is replaced.
pub(super) fn join(first: Option<Value>, next: Value) -> Value {
    match (first, next) {
        (Some(Value::Array(mut list)), Value::Array(more)) => {
            list.extend(more);
            Value::Array(list)
        }
        (Some(Value::Object(mut map)), Value::Object(more)) => {
            for (key, value) in more {
                let joined = match (map.remove(&key), value) {
                    // Only headers have lists as values: a name may come several times.
                    (Some(Value::Array(list)), Value::Array(more)) => {
                        join(Some(Value::Array(list)), Value::Array(more))
                    }
                    (_, value) => value,
                };
                map.insert(key, joined);
            }
            Value::Object(map)
        }
        (_, next) => next,
    }
}

fn parts_at(text: &str, separator: char) -> impl Iterator<Item = &str> {
    text.split(separator).map(str::trim).filter(|part| !part.is_empty())
}

fn parts(text: &str) -> impl Iterator<Item = &str> {
    parts_at(text, ',')
}

fn boolean(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// Whole numbers in the forms of Go's literals, as `strconv.ParseInt` reads them with base 0: also in hexadecimal, octal or
/// binary with their prefix, and with underscores between digits.
fn integer(text: &str) -> Result<i64, String> {
    let lower = text.strip_prefix(['-', '+']).unwrap_or(text).to_ascii_lowercase();
    let (digits, radix) = if let Some(hex) = lower.strip_prefix("0x") {
        (hex, 16)
    } else if let Some(binary) = lower.strip_prefix("0b") {
        (binary, 2)
    } else if let Some(octal) = lower.strip_prefix("0o").or(lower.strip_prefix('0').filter(|rest| !rest.is_empty())) {
        (octal, 8)
    } else {
        (lower.as_str(), 10)
    };
    // An underscore may follow the prefix, too.
    let is_misplaced = (radix == 10 && digits.starts_with('_')) || digits.ends_with('_') || digits.contains("__");
    // The standard library would take another sign.
    let is_number = !is_misplaced && !digits.starts_with(['-', '+']);
    let digits = digits.replace('_', "");
    let magnitude = i128::from_str_radix(&digits, radix).ok().filter(|_| is_number);
    let value = magnitude.map(|magnitude| if text.starts_with('-') { -magnitude } else { magnitude });
    value.and_then(|value| i64::try_from(value).ok()).ok_or_else(|| format!("{text:?} is not a whole number"))
}

/// Levels of verbosity are decimal only, without a sign and underscores, as upstream.
fn verbosity(text: &str) -> Result<u32, String> {
    let level = text.parse().ok().filter(|_| !text.starts_with('+'));
    level.ok_or_else(|| format!("{text:?} is not a level of verbosity"))
}

fn checked<T: std::str::FromStr>(text: &str, problem: impl FnOnce() -> String) -> Result<Value, String> {
    text.parse::<T>().map(|_| text.into()).map_err(|_| problem())
}

fn pair(text: &str, separator: char) -> Result<(&str, &str), String> {
    text.split_once(separator)
        .map(|(key, value)| (key.trim(), value.trim()))
        .ok_or_else(|| format!("{text:?} has no {separator:?}; expected key{separator}value"))
}

fn pairs(text: &str, separator: char, read: impl Fn(&str) -> Result<Value, String>) -> Result<Value, String> {
    let mut map = Map::new();
    for part in parts(text) {
        let (key, value) = pair(part, separator)?;
        map.insert(key.to_owned(), read(value).map_err(|problem| format!("{key}: {problem}"))?);
    }
    Ok(Value::Object(map))
}

/// As upstream reads labels: a key needs no value.
fn labels(text: &str) -> Value {
    let label = |part: &str| {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        (key.trim().to_owned(), Value::from(value.trim()))
    };
    Value::Object(parts(text).map(label).collect())
}

fn headers(text: &str) -> Result<Value, String> {
    let mut map = Map::new();
    for part in parts(text) {
        let (name, value) = pair(part, ':')?;
        let values = map.remove(name);
        map.insert(name.to_owned(), join(values, json!([value])));
    }
    Ok(Value::Object(map))
}

fn reserved_memory(text: &str) -> Result<Value, String> {
    let (node, limits) = pair(text, ':')?;
    let node = integer(node)?;
    let limits = pairs(limits, '=', |amount| {
        amount.parse::<Amount>().map(|_| amount.into()).map_err(|error| error.to_string())
    })?;
    Ok(json!({ "numaNode": node, "limits": limits }))
}

/// The API server accepts no Node with two taints of the same key and effect. As upstream, a taint to be removed (`key-`,
/// `key:Effect-`) is none.
fn taints(text: &str) -> Result<Value, String> {
    let mut taints: Vec<Value> = Vec::new();
    for part in parts(text).filter(|part| !part.ends_with('-')) {
        let next = taint(part)?;
        let is_same = |field: &str, other: &Value| next.get(field) == other.get(field);
        if taints.iter().any(|other| is_same("key", other) && is_same("effect", other)) {
            return Err(format!("{part:?} has the key and the effect of another taint"));
        }
        taints.push(next);
    }
    Ok(Value::Array(taints))
}

fn taint(text: &str) -> Result<Value, String> {
    let (key, effect) =
        text.rsplit_once(':').ok_or_else(|| format!("{text:?} has no effect; expected key=value:Effect"))?;
    let (key, value) = key.split_once('=').unwrap_or((key, ""));
    Ok(json!({ "key": key, "value": value, "effect": effect }))
}

fn vmodule(text: &str) -> Result<Value, String> {
    let (pattern, level) = pair(text, '=')?;
    Ok(json!({ "filePattern": pattern, "verbosity": verbosity(level)? }))
}
