//! Resource quantities (`100Mi`, `250m`, `1.5e3`) as far as configuration needs them: syntax, sign and size.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, de};
use serde_json::Value;

/// An amount, exact to a billionth; amounts beyond 2^63 units are held at that limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity {
    nano: i128,
}

/// Why a string is not a quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a quantity; write a number with an optional suffix, such as \"10Mi\", \"500m\" or \"2\"")]
pub struct QuantityError(String);

const NANO: i128 = 1_000_000_000;
const LIMIT: i128 = i64::MAX as i128 * NANO;

const SUFFIXES: [(&str, i128, i128); 15] = [
    ("", NANO, 1),
    ("n", 1, 1),
    ("u", 1_000, 1),
    ("m", 1_000_000, 1),
    ("k", NANO, 1_000),
    ("M", NANO, 1_000_000),
    ("G", NANO, 1_000_000_000),
    ("T", NANO, 1_000_000_000_000),
    ("P", NANO, 1_000_000_000_000_000),
    ("E", NANO, 1_000_000_000_000_000_000),
    ("Ki", NANO, 1 << 10),
    ("Mi", NANO, 1 << 20),
    ("Gi", NANO, 1 << 30),
    ("Ti", NANO, 1 << 40),
    ("Pi", NANO, 1 << 50),
];

impl Quantity {
    /// The amount in whole units, rounded up (away from zero for negative ones).
    pub fn value(self) -> i64 {
        let rounded = if self.nano >= 0 { (self.nano + NANO - 1) / NANO } else { (self.nano - NANO + 1) / NANO };
        i64::try_from(rounded).unwrap_or(if rounded < 0 { i64::MIN } else { i64::MAX })
    }

    /// The amount in thousandths, rounded up; CPU is counted in these.
    pub fn milli_value(self) -> i64 {
        let milli = NANO / 1_000;
        let rounded = if self.nano >= 0 { (self.nano + milli - 1) / milli } else { (self.nano - milli + 1) / milli };
        i64::try_from(rounded).unwrap_or(if rounded < 0 { i64::MIN } else { i64::MAX })
    }

    /// -1, 0 or 1.
    pub fn signum(self) -> i32 {
        self.nano.signum() as i32
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        read(text).ok_or_else(|| QuantityError(text.to_owned()))
    }
}

fn read(text: &str) -> Option<Quantity> {
    let (negative, unsigned) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let (unit_nano, multiplier) = scale(suffix)?;
    // Longer numbers than these are beyond any limit or below any digit that counts.
    let whole: i128 = if whole.len() > 24 {
        LIMIT
    } else if whole.is_empty() {
        0
    } else {
        whole.parse().ok()?
    };
    let digits = &fraction[..fraction.len().min(18)];
    let mut nano = whole.saturating_mul(unit_nano).saturating_mul(multiplier);
    if !digits.is_empty() {
        let divisor = 10i128.pow(digits.len() as u32);
        let part = digits.parse::<i128>().ok()?.saturating_mul(unit_nano).saturating_mul(multiplier);
        nano = nano.saturating_add((part + divisor - 1) / divisor);
    }
    let nano = nano.min(LIMIT);
    Some(Quantity { nano: if negative { -nano } else { nano } })
}

/// Nano-units per unit and the multiplier a suffix stands for.
fn scale(suffix: &str) -> Option<(i128, i128)> {
    if suffix == "Ei" {
        return Some((NANO, 1 << 60));
    }
    if let Some((_, unit, multiplier)) = SUFFIXES.iter().find(|(name, _, _)| *name == suffix) {
        return Some((*unit, *multiplier));
    }
    let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    match exponent {
        0..=18 => Some((NANO, 10i128.pow(exponent as u32))),
        -9..0 => Some((NANO / 10i128.pow(exponent.unsigned_abs()), 1)),
        19.. => Some((NANO, 10i128.pow(18))),
        _ => None,
    }
}

impl fmt::Display for Quantity {
    /// Whole units where the amount is whole, thousandths otherwise.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nano % NANO == 0 { write!(f, "{}", self.nano / NANO) } else { write!(f, "{}m", self.milli_value()) }
    }
}

/// A quantity in a document may be text or a bare number; it is kept as text.
pub fn quantity_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Text::deserialize(deserializer).map(|text| text.0)
}

/// The same for a map of quantities.
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
        text.parse::<Quantity>().map_err(de::Error::custom)?;
        Ok(Self(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes() {
        for (text, value) in [
            ("0", 0),
            ("10Mi", 10 << 20),
            ("1.5Gi", 3 << 29),
            ("100M", 100_000_000),
            ("1e3", 1_000),
            ("2E", 2_000_000_000_000_000_000),
            ("500m", 1),
            ("-1", -1),
            ("+3k", 3_000),
            ("1Ei", 1 << 60),
            ("99Ei", i64::MAX),
            (".5Ki", 512),
        ] {
            let quantity: Quantity = text.parse().expect(text);
            assert_eq!(quantity.value(), value, "{text}");
        }
        assert_eq!("250m".parse::<Quantity>().expect("250m").milli_value(), 250);
    }

    #[test]
    fn refuses_what_is_no_quantity() {
        for bad in ["", "-", "Mi", "1 Mi", "1mi", "1KB", "1..2", "1e", "ten", "1Mi5"] {
            assert!(bad.parse::<Quantity>().is_err(), "{bad:?} must not be a quantity");
        }
    }
}
