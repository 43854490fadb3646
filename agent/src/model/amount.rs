//! Resource quantities (`100Mi`, `250m`, `1.5e3`) as numbers: parsed exactly, compared, added, written back.

use std::fmt;
use std::str::FromStr;

/// An amount of a resource, exact to a billionth of its unit, held at 2^63-1 units like the API does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount {
    nano: i128,
}

/// The text is no quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'")]
pub struct AmountError;

const NANO: i128 = 1_000_000_000;
const LIMIT: i128 = (i64::MAX as i128) * NANO;

impl Amount {
    /// Whole units, rounded up (away from zero for negative amounts).
    pub fn value(self) -> i64 {
        self.rounded_up(NANO)
    }

    /// Thousandths, rounded up; CPU is counted in these.
    pub fn milli_value(self) -> i64 {
        self.rounded_up(NANO / 1000)
    }

    /// Less than nothing.
    pub fn is_negative(self) -> bool {
        self.nano < 0
    }

    /// Exactly nothing.
    pub fn is_zero(self) -> bool {
        self.nano == 0
    }

    /// A whole number of units.
    pub fn is_whole(self) -> bool {
        self.nano % NANO == 0
    }

    /// The sum, held at the limit.
    pub fn plus(self, other: Self) -> Self {
        Self { nano: (self.nano + other.nano).clamp(-LIMIT, LIMIT) }
    }

    fn rounded_up(self, unit: i128) -> i64 {
        let away = if self.nano < 0 { 1 - unit } else { unit - 1 };
        let rounded = (self.nano + away) / unit;
        i64::try_from(rounded).unwrap_or(if rounded < 0 { i64::MIN } else { i64::MAX })
    }
}

impl FromStr for Amount {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, AmountError> {
        let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
        let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(end);
        let magnitude = magnitude(number, suffix).ok_or(AmountError)?;
        Ok(Self { nano: if text.starts_with('-') { -magnitude } else { magnitude } })
    }
}

/// Nano-units of a decimal number with a suffix; what lies beyond the limit counts as the limit, what lies below a
/// nano-unit is rounded up.
fn magnitude(number: &str, suffix: &str) -> Option<i128> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let (up, down) = scale(suffix)?;
    let whole_digits = whole.trim_start_matches('0');
    if whole_digits.len() > 38 {
        return Some(LIMIT);
    }
    let whole: i128 = if whole_digits.is_empty() { 0 } else { whole_digits.parse().ok()? };
    let scaled = |value: i128, extra_down: i128| -> Option<i128> {
        let product = value.checked_mul(up)?;
        let divisor = down.checked_mul(extra_down)?;
        Some(product / divisor + i128::from(product % divisor != 0))
    };
    // Eighteen digits after the point reach below a nano of any unit that is not itself cut off by the limit.
    let digits = &fraction[..fraction.len().min(18)];
    let part: i128 = if digits.is_empty() { 0 } else { digits.parse().ok()? };
    let tenths = 10i128.pow(u32::try_from(digits.len()).ok()?);
    let sum = scaled(whole, 1).and_then(|w| scaled(part, tenths).and_then(|p| w.checked_add(p)));
    Some(sum.unwrap_or(LIMIT).min(LIMIT))
}

/// Nano-units per unit of the suffix, as a fraction.
fn scale(suffix: &str) -> Option<(i128, i128)> {
    let times = |n: i128| Some((NANO * n, 1));
    match suffix {
        "n" => Some((1, 1)),
        "u" => Some((1_000, 1)),
        "m" => Some((1_000_000, 1)),
        "" => times(1),
        "k" => times(1_000),
        "M" => times(1_000_000),
        "G" => times(1_000_000_000),
        "T" => times(1_000_000_000_000),
        "P" => times(1_000_000_000_000_000),
        "E" => times(1_000_000_000_000_000_000),
        "Ki" => times(1 << 10),
        "Mi" => times(1 << 20),
        "Gi" => times(1 << 30),
        "Ti" => times(1 << 40),
        "Pi" => times(1 << 50),
        "Ei" => times(1 << 60),
        _ => match suffix.strip_prefix(['e', 'E'])?.parse::<i32>().ok()? {
            exponent @ 0..=18 => times(10i128.pow(exponent.unsigned_abs())),
            exponent @ -18..0 => Some((NANO, 10i128.pow(exponent.unsigned_abs()))),
            exponent if exponent > 0 => times(10i128.pow(19)),
            _ => Some((NANO, 10i128.pow(19))),
        },
    }
}

impl fmt::Display for Amount {
    /// Whole units where the amount is whole, else the coarsest of thousandths, millionths and billionths that is
    /// exact.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, suffix) in [(NANO, ""), (NANO / 1_000, "m"), (NANO / 1_000_000, "u")] {
            if self.nano % unit == 0 {
                return write!(f, "{}{suffix}", self.nano / unit);
            }
        }
        write!(f, "{}n", self.nano)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn amount(text: &str) -> Amount {
        text.parse().unwrap_or_else(|_| panic!("{text} is a quantity"))
    }

    #[test]
    fn reads_every_suffix() {
        for (text, value) in [
            ("0", 0),
            ("10Mi", 10 << 20),
            ("1.5Gi", 3 << 29),
            ("100M", 100_000_000),
            ("1e3", 1_000),
            ("1E3", 1_000),
            ("5e-1", 1),
            ("2E", 2_000_000_000_000_000_000),
            ("500m", 1),
            ("-1", -1),
            ("-1500m", -2),
            ("+3k", 3_000),
            ("1Ei", 1 << 60),
            ("99Ei", i64::MAX),
            (".5Ki", 512),
            ("1.", 1),
            ("1e99", i64::MAX),
            ("0e99", 0),
        ] {
            assert_eq!(amount(text).value(), value, "{text}");
        }
        assert_eq!(amount("0.1").milli_value(), 100);
        assert_eq!(amount("100u").milli_value(), 1, "rounds up");
        assert!(amount("1Gi") > amount("1G"));
    }

    #[test]
    fn refuses_what_is_no_quantity() {
        for bad in ["", "-", "+", ".", "1Kib", "1 Mi", "Mi", "1.2.3", "1e", "1ee3", "0x10", "--1", "1k1", "\u{0664}"] {
            assert!(bad.parse::<Amount>().is_err(), "{bad:?} is no quantity");
        }
    }

    #[test]
    fn writes_the_exact_amount() {
        for (text, shown) in [("1.5", "1500m"), ("2", "2"), ("1u", "1u"), ("1500n", "1500n"), ("1Ki", "1024")] {
            assert_eq!(amount(text).to_string(), shown);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_but_never_panics(text in "[-+]?[0-9.]{0,60}[a-zA-Z0-9+-]{0,6}") {
            let _ = text.parse::<Amount>();
        }

        #[test]
        fn what_is_written_reads_back(nano in -1_000_000_000_000_000_000_000i128..1_000_000_000_000_000_000_000) {
            let amount = Amount { nano };
            prop_assert_eq!(amount.to_string().parse::<Amount>(), Ok(amount));
        }
    }
}
