//! Resource quantities in documents: text or a bare number, kept as text once it is known to be a quantity.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::Deserializer;
use serde::de;
use serde_json::Value;

use crate::model::Amount;

/// Reads one quantity.
///
/// # Errors
/// The value is neither a string nor a number.
pub fn quantity_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Text::deserialize(deserializer).map(|text| text.0)
}

/// Reads a map of quantities.
///
/// # Errors
/// A value is neither a string nor a number.
pub fn quantity_map<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    let map = BTreeMap::<String, Text>::deserialize(deserializer)?;
    Ok(map.into_iter().map(|(key, text)| (key, text.0)).collect())
}

struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = match Value::deserialize(deserializer)? {
            Value::String(text) => text,
            Value::Number(number) => number.to_string(),
            other => return Err(de::Error::custom(format!("{other} is not a quantity, such as \"10Mi\""))),
        };
        text.parse::<Amount>().map_err(de::Error::custom)?;
        Ok(Self(text))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_and_numbers() {
        assert_eq!(quantity_text(json!("64Ki")).unwrap(), "64Ki");
        assert_eq!(quantity_text(json!(128)).unwrap(), "128");
        assert!(quantity_text(json!(true)).unwrap_err().to_string().starts_with("true is not a quantity"));
        assert!(quantity_map(json!({"memory": "1GiB"})).is_err());
    }
}
