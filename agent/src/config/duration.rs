//! Durations as the Kubernetes API writes them: Go's `1h30m0s` strings, kept to the nanosecond and possibly negative.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;
use serde::Deserializer;
use serde::Serialize;
use serde::Serializer;
use serde::de;

use crate::model::go_duration;

/// A signed number of nanoseconds, read and written the way Go's `time.Duration` is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GoDuration(i64);

/// Why a string is not a duration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// Not a sequence of numbers with units.
    #[error("{0:?} is not a duration; write a number with a unit, such as \"10s\", \"1m30s\" or \"250ms\"")]
    Syntax(String),
    /// More nanoseconds than 63 bits hold.
    #[error("{0:?} is too long; durations end at about 292 years")]
    Range(String),
}

const UNITS: [(&str, i64); 8] = [
    ("ns", 1),
    ("us", 1_000),
    ("µs", 1_000),
    ("μs", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("m", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

impl GoDuration {
    /// A whole number of milliseconds.
    pub const fn millis(millis: i64) -> Self {
        Self(millis * 1_000_000)
    }

    /// A whole number of seconds.
    pub const fn secs(secs: i64) -> Self {
        Self(secs * 1_000_000_000)
    }

    /// A whole number of minutes.
    pub const fn mins(mins: i64) -> Self {
        Self::secs(mins * 60)
    }

    /// A whole number of nanoseconds.
    pub const fn nanos(nanos: i64) -> Self {
        Self(nanos)
    }

    /// The length in nanoseconds.
    pub const fn as_nanos(self) -> i64 {
        self.0
    }

    /// The length as an unsigned duration; a negative one counts as zero.
    pub const fn std(self) -> Duration {
        Duration::from_nanos(if self.0 < 0 { 0 } else { self.0 as u64 })
    }

    /// Exactly no time at all.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Less than no time.
    pub const fn is_negative(self) -> bool {
        self.0 < 0
    }
}

impl FromStr for GoDuration {
    type Err = DurationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let syntax = || DurationError::Syntax(text.to_owned());
        let (negative, mut rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        if rest == "0" {
            return Ok(Self(0));
        }
        if rest.is_empty() {
            return Err(syntax());
        }
        let mut total: i128 = 0;
        while !rest.is_empty() {
            let (nanos, after) = leading_part(rest).ok_or_else(syntax)?;
            total = total.checked_add(nanos).ok_or_else(|| DurationError::Range(text.to_owned()))?;
            rest = after;
        }
        let signed = if negative { -total } else { total };
        i64::try_from(signed).map(Self).map_err(|_| DurationError::Range(text.to_owned()))
    }
}

/// Reads one `12.5s`; returns its nanoseconds and what follows.
fn leading_part(text: &str) -> Option<(i128, &str)> {
    let number_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, rest) = text.split_at(number_end);
    let unit_end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
    let (unit, rest) = rest.split_at(unit_end);
    let scale = i128::from(UNITS.iter().find(|(name, _)| *name == unit)?.1);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') || whole.len() > 20 {
        return None;
    }
    let nanos = if whole.is_empty() { 0 } else { whole.parse::<i128>().ok()? * scale };
    // Nineteen digits are all that fit; floating point as in Go, so that both round alike.
    let digits = &fraction[..fraction.len().min(19)];
    let part = digits.parse::<u64>().unwrap_or(0) as f64 * (scale as f64 / 10f64.powi(digits.len() as i32));
    Some((nanos + part as i128, rest))
}

impl fmt::Display for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.is_negative() { "-" } else { "" };
        write!(f, "{sign}{}", go_duration(Duration::from_nanos(self.0.unsigned_abs())))
    }
}

impl Serialize for GoDuration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GoDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)
            .map_err(|error| de::Error::custom(format!("{error} that is a duration, such as \"10s\"")))?;
        text.parse().map_err(de::Error::custom)
    }
}

/// `logging.flushFrequency` is the one duration that may also be a bare number, of nanoseconds.
///
/// # Errors
/// The value is neither a duration nor a number of nanoseconds.
pub fn duration_or_nanos<'de, D: Deserializer<'de>>(deserializer: D) -> Result<GoDuration, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a duration such as \"5s\" or a number of nanoseconds")]
    enum Either {
        Nanos(i64),
        Text(String),
    }
    match Either::deserialize(deserializer)? {
        Either::Nanos(nanos) => Ok(GoDuration(nanos)),
        Either::Text(text) => text.parse().map_err(de::Error::custom),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn written_as_go_writes_them() {
        for (nanos, text) in [
            (0, "0s"),
            (1, "1ns"),
            (1_100, "1.1µs"),
            (2_200_000, "2.2ms"),
            (3_300_000_000, "3.3s"),
            (90_000_000_000, "1m30s"),
            (245_000_000_000, "4m5s"),
            (14_400_000_000_000, "4h0m0s"),
            (-60_000_000_000, "-1m0s"),
            (i64::MAX, "2562047h47m16.854775807s"),
            (i64::MIN, "-2562047h47m16.854775808s"),
        ] {
            assert_eq!(GoDuration(nanos).to_string(), text);
            assert_eq!(text.parse(), Ok(GoDuration(nanos)), "{text}");
        }
    }

    #[test]
    fn reads_every_unit_and_refuses_the_rest() {
        for (text, nanos) in [
            ("0", 0),
            ("+5s", 5_000_000_000),
            (".5s", 500_000_000),
            ("1.5h", 5_400_000_000_000),
            ("1m1m", 120_000_000_000),
            ("1h15m30.918s", 4_530_918_000_000),
            ("0.3333333333333333333h", 1_200_000_000_000),
            ("52us52µs52μs", 156_000),
        ] {
            assert_eq!(text.parse(), Ok(GoDuration(nanos)), "{text}");
        }
        for bad in ["", "-", "3", "s", ".", "1.s.", "10 s", "1d", "x1s", "1..2s", "99999999999h"] {
            assert!(bad.parse::<GoDuration>().is_err(), "{bad:?} must not be a duration");
        }
    }

    proptest! {
        #[test]
        fn writing_and_reading_return_the_same(nanos in any::<i64>()) {
            prop_assert_eq!(GoDuration(nanos).to_string().parse(), Ok(GoDuration(nanos)));
        }
    }
}
