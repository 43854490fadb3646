//! Exact arithmetic on Kubernetes quantities (`1500m`, `64Mi`, `2e3`). Owns parsing, rounding and the canonical text;
//! refuses floats and does not know what a quantity measures.
//!
//! Amounts are held in nano-units, the finest step the API knows: finer input is rounded away from zero, and anything
//! beyond ±(2^63 - 1) whole units is capped there.

use std::fmt;
use std::iter::Sum;
use std::ops::Add;
use std::ops::AddAssign;
use std::ops::Sub;
use std::str::FromStr;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

const NANOS: i128 = 1_000_000_000;
const NANOS_PER_MILLI: i128 = 1_000_000;
const CAP: i128 = i64::MAX as i128 * NANOS;

/// Decimal suffixes by power of ten.
const DECIMAL: [(&str, i32); 10] =
    [("n", -9), ("u", -6), ("m", -3), ("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15), ("E", 18)];
/// Binary suffixes by power of two.
const BINARY: [(&str, u32); 6] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40), ("Pi", 50), ("Ei", 60)];

/// Which family of suffixes a quantity was written with, and is written back with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Notation {
    #[default]
    Decimal,
    Binary,
    Exponent,
}

/// A parsed quantity. Compares by amount, whatever the notation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Amount {
    nanos: i128,
    notation: Notation,
}

/// A text that is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a quantity (a number with an optional suffix, such as 100m, 1.5, 64Mi or 2e3)")]
pub struct QuantityError {
    /// What was given.
    pub text: String,
}

impl Amount {
    /// Nothing.
    pub const ZERO: Self = Self { nanos: 0, notation: Notation::Decimal };

    /// That many whole units, in decimal notation.
    pub fn units(value: i64) -> Self {
        Self { nanos: i128::from(value) * NANOS, notation: Notation::Decimal }
    }

    /// That many thousandths, in decimal notation.
    pub fn millis(value: i64) -> Self {
        Self { nanos: i128::from(value) * NANOS_PER_MILLI, notation: Notation::Decimal }
    }

    /// That many whole units, in binary notation: bytes.
    pub fn bytes(value: i64) -> Self {
        Self { nanos: i128::from(value) * NANOS, notation: Notation::Binary }
    }

    /// Whole units, rounded away from zero.
    pub fn value(self) -> i64 {
        narrow(divide_away(self.nanos, NANOS))
    }

    /// Thousandths, rounded away from zero and capped at the range of `i64`.
    pub fn milli_value(self) -> i64 {
        narrow(divide_away(self.nanos, NANOS_PER_MILLI))
    }

    /// The same amount in whole thousandths, rounded away from zero.
    pub fn rounded_to_millis(self) -> Self {
        Self::capped(divide_away(self.nanos, NANOS_PER_MILLI) * NANOS_PER_MILLI, self.notation)
    }

    /// True if the amount is exactly zero.
    pub fn is_zero(self) -> bool {
        self.nanos == 0
    }

    /// True if the amount is more than zero.
    pub fn is_positive(self) -> bool {
        self.nanos > 0
    }

    /// True if the amount is less than zero.
    pub fn is_negative(self) -> bool {
        self.nanos < 0
    }

    /// True if the amount is a whole number of units.
    pub fn is_whole(self) -> bool {
        self.nanos % NANOS == 0
    }

    /// The API's text type, in canonical form.
    pub fn to_quantity(self) -> Quantity {
        Quantity(self.to_string())
    }

    fn capped(nanos: i128, notation: Notation) -> Self {
        Self { nanos: nanos.clamp(-CAP, CAP), notation }
    }
}

impl PartialEq for Amount {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Amount {}

impl PartialOrd for Amount {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Amount {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl Add for Amount {
    type Output = Self;

    /// The sum, capped; written as the left side is, or as the right one if the left is zero.
    fn add(self, other: Self) -> Self {
        let notation = if self.is_zero() { other.notation } else { self.notation };
        Self::capped(self.nanos + other.nanos, notation)
    }
}

impl Sub for Amount {
    type Output = Self;

    /// The difference, capped; written as the left side is.
    fn sub(self, other: Self) -> Self {
        Self::capped(self.nanos - other.nanos, self.notation)
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Amount {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Add::add)
    }
}

impl TryFrom<&Quantity> for Amount {
    type Error = QuantityError;

    fn try_from(quantity: &Quantity) -> Result<Self, QuantityError> {
        quantity.0.parse()
    }
}

impl FromStr for Amount {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, QuantityError> {
        parse(text).ok_or_else(|| QuantityError { text: text.to_owned() })
    }
}

impl fmt::Display for Amount {
    /// Canonical form: the largest suffix of the notation that needs no fraction.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = self.nanos / NANOS;
        match self.notation {
            // Its suffixes have no fractions of a unit.
            Notation::Binary if self.is_whole() && units.abs() >= 1024 => {
                let power = (units.trailing_zeros() / 10).min(6);
                let suffix = BINARY.iter().find(|(_, shift)| *shift == power * 10).map_or("", |(s, _)| s);
                write!(f, "{}{suffix}", units >> (power * 10))
            }
            _ if self.nanos == 0 => f.write_str("0"),
            notation => {
                let fits = |exponent: i32| self.nanos % 10_i128.pow((exponent + 9).unsigned_abs()) == 0;
                let (suffix, exponent) = DECIMAL.iter().rev().find(|(_, e)| fits(*e)).unwrap_or(&DECIMAL[0]);
                let mantissa = self.nanos / 10_i128.pow((exponent + 9).unsigned_abs());
                match notation {
                    Notation::Exponent if *exponent != 0 => write!(f, "{mantissa}e{exponent}"),
                    _ => write!(f, "{mantissa}{suffix}"),
                }
            }
        }
    }
}

fn parse(text: &str) -> Option<Amount> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let (factor, exponent, notation) = parse_suffix(suffix)?;
    let digits = [whole, fraction].concat();
    let significant = digits.trim_start_matches('0');
    let point = i64::try_from(significant.len()).ok()? - i64::try_from(fraction.len()).ok()? + i64::from(exponent);
    let magnitude = scale(significant.as_bytes(), point, factor * NANOS);
    Some(Amount::capped(if text.starts_with('-') { -magnitude } else { magnitude }, notation))
}

/// Factor, power of ten and notation a suffix stands for.
fn parse_suffix(suffix: &str) -> Option<(i128, i32, Notation)> {
    if let Some((_, exponent)) = DECIMAL.iter().find(|(s, _)| *s == suffix) {
        return Some((1, *exponent, Notation::Decimal));
    }
    if let Some((_, shift)) = BINARY.iter().find(|(s, _)| *s == suffix) {
        return Some((1 << shift, 0, Notation::Binary));
    }
    let exponent = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
    Some((1, exponent, Notation::Exponent))
}

/// `0.DIGITS * 10^point * factor`, rounded up and capped. The first digit is not zero.
fn scale(digits: &[u8], point: i64, factor: i128) -> i128 {
    if digits.is_empty() {
        return 0;
    }
    let value = |digit: &u8| i128::from(digit - b'0');
    // Forty digits before the point are beyond i128, forty zeros behind it leave nothing of any factor.
    let whole_len = usize::try_from(point.clamp(0, 40)).unwrap_or(0);
    let zeros = usize::try_from((-point).clamp(0, 40)).unwrap_or(0);
    let whole = (0..whole_len)
        .map(|i| digits.get(i).map_or(0, value))
        .fold(0_i128, |sum, digit| sum.saturating_mul(10).saturating_add(digit));
    let mut fraction = 0;
    let mut inexact = false;
    let behind = digits.iter().skip(whole_len).rev().map(value);
    for digit in behind.chain(std::iter::repeat_n(0, zeros)) {
        let ten_times = fraction + digit * factor;
        inexact |= ten_times % 10 != 0;
        fraction = ten_times / 10;
    }
    whole.saturating_mul(factor).saturating_add(fraction + i128::from(inexact)).min(CAP)
}

fn divide_away(number: i128, divisor: i128) -> i128 {
    let rest = number % divisor;
    number / divisor + if rest == 0 { 0 } else { rest.signum() }
}

fn narrow(number: i128) -> i64 {
    i64::try_from(number).unwrap_or(if number < 0 { i64::MIN } else { i64::MAX })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn amount(text: &str) -> Amount {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn reads_every_notation() {
        for (text, nanos) in [
            ("0", 0),
            ("1", 1_000_000_000),
            ("+1", 1_000_000_000),
            ("-1", -1_000_000_000),
            ("1.", 1_000_000_000),
            (".5", 500_000_000),
            ("007", 7_000_000_000),
            ("100m", 100_000_000),
            ("1.5", 1_500_000_000),
            ("3n", 3),
            ("3u", 3_000),
            ("0.1n", 1),
            ("1.0000000001", 1_000_000_001),
            ("2k", 2_000_000_000_000),
            ("1E", 1_000_000_000_000_000_000_000_000_000),
            ("1e3", 1_000_000_000_000),
            ("1E-3", 1_000_000),
            ("1e+2", 100_000_000_000),
            ("1Ki", 1_024_000_000_000),
            ("0.5Ki", 512_000_000_000),
            ("0.1Mi", 104_857_600_000_000),
            ("1e-40", 1),
            ("0e40", 0),
            ("0.000", 0),
        ] {
            assert_eq!(amount(text).nanos, nanos, "{text}");
        }
    }

    #[test]
    fn caps_what_is_too_large() {
        for text in ["1e400", "99999999999999999999", "10E", "9Ei", "1e2000000000"] {
            assert_eq!(amount(text).value(), i64::MAX, "{text}");
            assert_eq!(amount(&format!("-{text}")).value(), -i64::MAX, "-{text}");
            assert_eq!(amount(text).milli_value(), i64::MAX, "{text}");
        }
        assert_eq!((amount("8E") + amount("8E")).value(), i64::MAX);
    }

    #[test]
    fn refuses_what_is_no_quantity() {
        for text in ["", ".", "+", "m", "1.2.3", "1 Gi", " 1", "1e", "1e+", "0x10", "1ki", "1Kib", "1e3m", "--1", "é"]
        {
            let error = text.parse::<Amount>().expect_err(text);
            assert!(error.to_string().contains("not a quantity"), "{error}");
        }
    }

    #[test]
    fn rounds_away_from_zero() {
        for (text, value, milli) in
            [("1m", 1, 1), ("1u", 1, 1), ("1.5", 2, 1_500), ("-1.5", -2, -1_500), ("2", 2, 2_000), ("-1u", -1, -1)]
        {
            assert_eq!((amount(text).value(), amount(text).milli_value()), (value, milli), "{text}");
        }
    }

    #[test]
    fn writes_canonical_text() {
        for (text, canonical) in [
            ("0", "0"),
            ("0Ki", "0"),
            ("1.5", "1500m"),
            ("1.5Gi", "1536Mi"),
            ("1000m", "1"),
            ("1000", "1k"),
            ("1024", "1024"),
            ("1024Ki", "1Mi"),
            ("1Ki", "1Ki"),
            ("0.5Ki", "512"),
            ("1.1Ki", "1126400m"),
            ("1000e3", "1e6"),
            ("5e0", "5"),
            ("5e-3", "5e-3"),
            ("-2000", "-2k"),
            ("-2048Ki", "-2Mi"),
        ] {
            assert_eq!(amount(text).to_string(), canonical, "{text}");
        }
    }

    #[test]
    fn a_sum_keeps_the_first_notation() {
        let sum: Amount = ["0", "1Ki", "1000"].into_iter().map(amount).sum();
        assert_eq!((sum.value(), sum.to_quantity().0.as_str()), (2024, "2024"));
        assert_eq!((amount("1Mi") + amount("1024Ki")).to_string(), "2Mi");
    }

    proptest! {
        #[test]
        fn canonical_text_means_the_same(whole in -1_000_000_000_000_i64..1_000_000_000_000, suffix in "n|u|m||k|M|G|e3|e-6") {
            let written = amount(&format!("{whole}{suffix}"));
            prop_assert_eq!(amount(&written.to_string()), written);
        }

        #[test]
        fn binary_integers_survive(whole in 0_i64..1_000_000, suffix in "Ki|Mi|Gi") {
            let written = amount(&format!("{whole}{suffix}"));
            prop_assert_eq!(amount(&written.to_string()), written);
        }

        #[test]
        fn agrees_with_integer_arithmetic(whole in 0_i64..1_000_000, milli in 0_i64..1000) {
            let parsed = amount(&format!("{whole}.{milli:03}Ki"));
            prop_assert_eq!(parsed.milli_value(), (whole * 1000 + milli) * 1024);
        }

        #[test]
        fn never_panics(text in "[-+]?[0-9.]{0,50}([a-zA-Z]{0,2}[-+0-9]{0,12})?") {
            let _parsed = text.parse::<Amount>();
        }
    }
}
