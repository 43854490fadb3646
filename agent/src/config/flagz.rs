//! Every flag with its effective value, as `/flagz` shows them: the value of the command line, or the effective value of the
//! field that the flag sets.

use std::collections::BTreeMap;

use serde_json::Value;

use super::flags::FLAGS;
use super::flags::Target;
use super::settings::Settings;
use super::settings::to_json;
use crate::model::quote::masked_url;

/// Flags whose values are not shown: they may hold secrets.
const CLASSIFIED: [&str; 1] = ["manifest-url-header"];

impl Settings {
    /// Each flag that sets something, by name.
    pub fn flag_values(&self) -> BTreeMap<String, String> {
        let (own, fields) = (Value::Object(to_json(&self.flags)), Value::Object(to_json(&self.kubelet)));
        let values = FLAGS.iter().filter_map(|flag| {
            let value = match flag.target {
                Target::Own => own.get(flag.name),
                Target::Field(path) => path.split('.').try_fold(&fields, |value, name| value.get(name)),
                Target::Nothing => return None,
            };
            let shown = match value.map(text).unwrap_or_default() {
                set if !set.is_empty() && CLASSIFIED.contains(&flag.name) => "CLASSIFIED".to_owned(),
                url if flag.name == "manifest-url" => masked_url(&url),
                other => other,
            };
            Some((flag.name.to_owned(), shown))
        });
        values.collect()
    }
}

/// As flags are written: lists by commas, maps as `key=value`.
fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        Value::Object(map) => {
            map.iter().map(|(key, value)| format!("{key}={}", text(value))).collect::<Vec<_>>().join(",")
        }
        Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::FlagValues;
    use super::super::load;

    #[test]
    fn effective_values_by_flag() {
        let (header, url) = (("manifest-url-header", "Token:secret"), ("manifest-url", "https://me:secret@pods.test/"));
        let flags: FlagValues = [("node-ip", "192.0.2.1"), ("v", "2"), header, url].into_iter().collect();
        let values = load(&flags).expect("acceptable").flag_values();
        let hidden = [("manifest-url-header", "CLASSIFIED"), ("manifest-url", "https://me:masked@pods.test/")];
        for (name, expected) in [("node-ip", "192.0.2.1"), ("v", "2"), ("port", "10250")].into_iter().chain(hidden) {
            assert_eq!(values.get(name).map(String::as_str), Some(expected), "{name}");
        }
        assert!(!format!("{values:?}").contains("secret"));
    }
}
