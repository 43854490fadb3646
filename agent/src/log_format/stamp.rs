//! Timestamps of log lines (RFC 3339), parsed and written without a calendar type for speed: a busy log has ten
//! thousand of them a second. Pure.

/// A parsed timestamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp<'a> {
    /// Unix nanoseconds; of a time before 1677 or after 2262, which has none, the smallest or largest number.
    pub nanos: i64,
    /// Date and time to the second, `2006-01-02T15:04:05`.
    seconds: &'a [u8],
    /// Digits of the fraction.
    fraction: &'a [u8],
    /// `Z` or `+hh:mm`.
    zone: &'a [u8],
}

/// Digits of a fraction in nanoseconds.
const DIGITS: usize = 9;

impl<'a> Stamp<'a> {
    /// Parses `2006-01-02T15:04:05[.fraction](Z|±hh:mm)`; `None` for anything else.
    pub fn parse(text: &'a [u8]) -> Option<Self> {
        let (seconds, rest) = text.split_at_checked(19)?;
        let punctuation = [(4, b'-'), (7, b'-'), (10, b'T'), (13, b':'), (16, b':')];
        if punctuation.iter().any(|(at, expected)| seconds[*at] != *expected) {
            return None;
        }
        let (fraction, zone) = match rest.split_first()? {
            (b'.' | b',', rest) => {
                let length = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
                rest.split_at_checked(length).filter(|(digits, _)| !digits.is_empty())?
            }
            _ => (&rest[..0], rest),
        };
        let [year, month, day] = [number(&seconds[..4])?, number(&seconds[5..7])?, number(&seconds[8..10])?];
        let [hour, minute, second] = [number(&seconds[11..13])?, number(&seconds[14..16])?, number(&seconds[17..])?];
        let valid = (1..=12).contains(&month) && (1..=days_of(year, month)).contains(&day);
        if !valid || hour > 23 || minute > 59 || second > 59 {
            return None;
        }
        let of_day = hour * 3600 + minute * 60 + second - offset(zone)?;
        // Years have four digits.
        let whole = days_since_epoch(year, month, day) * 86_400 + of_day;
        let exact = i128::from(whole) * 1_000_000_000 + i128::from(nanos_of(fraction));
        let nanos = i64::try_from(exact).unwrap_or(if whole < 0 { i64::MIN } else { i64::MAX });
        Some(Self { nanos, seconds, fraction, zone })
    }

    /// Writes the timestamp with nine digits of fraction, in its original zone.
    pub fn write_fixed(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.seconds);
        out.push(b'.');
        let kept = &self.fraction[..self.fraction.len().min(DIGITS)];
        out.extend_from_slice(kept);
        out.extend(std::iter::repeat_n(b'0', DIGITS - kept.len()));
        match self.zone {
            b"+00:00" | b"-00:00" => out.push(b'Z'),
            zone => out.extend_from_slice(zone),
        }
    }
}

fn number(digits: &[u8]) -> Option<i64> {
    digits.iter().try_fold(0, |sum, byte| byte.is_ascii_digit().then(|| sum * 10 + i64::from(byte - b'0')))
}

fn nanos_of(fraction: &[u8]) -> i64 {
    let digits = fraction.iter().map(|byte| i64::from(byte - b'0')).chain(std::iter::repeat(0));
    digits.take(DIGITS).fold(0, |sum, digit| sum * 10 + digit)
}

/// Seconds east of UTC.
fn offset(zone: &[u8]) -> Option<i64> {
    let (sign, rest) = match zone {
        b"Z" => return Some(0),
        [b'+', rest @ ..] => (1, rest),
        [b'-', rest @ ..] => (-1, rest),
        _ => return None,
    };
    if rest.len() != 5 || rest[2] != b':' {
        return None;
    }
    let (hours, minutes) = (number(&rest[..2])?, number(&rest[3..])?);
    (hours < 24 && minutes < 60).then_some(sign * (hours * 3600 + minutes * 60))
}

fn is_leap(year: i64) -> bool {
    (year % 4 == 0 && year % 100 != 0) || year % 400 == 0
}

fn days_of(year: i64, month: i64) -> i64 {
    match month {
        2 => 28 + i64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days from 1970-01-01 to a date of the Gregorian calendar.
fn days_since_epoch(year: i64, month: i64, day: i64) -> i64 {
    let before = year - 1;
    let of_years = 365 * before + before / 4 - before / 100 + before / 400;
    let of_months: i64 = (1..month).map(|month| days_of(year, month)).sum();
    // 719162 days lie before 1970-01-01, counted from 0001-01-01.
    of_years + of_months + day - 1 - 719_162
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use proptest::prelude::*;

    use super::*;

    fn fixed(text: &str) -> Option<String> {
        let mut out = Vec::new();
        Stamp::parse(text.as_bytes())?.write_fixed(&mut out);
        String::from_utf8(out).ok()
    }

    #[test]
    fn written_with_nine_digits() {
        for (text, expected) in [
            ("2016-10-06T00:17:09.669794202Z", "2016-10-06T00:17:09.669794202Z"),
            ("2016-10-06T00:17:09Z", "2016-10-06T00:17:09.000000000Z"),
            ("2016-10-06T00:17:09.5+02:00", "2016-10-06T00:17:09.500000000+02:00"),
            ("2016-10-06T00:17:09.1234567891+00:00", "2016-10-06T00:17:09.123456789Z"),
        ] {
            assert_eq!(fixed(text).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn malformed_timestamps() {
        for text in [
            "",
            "2016-10-06",
            "2016-10-06 00:17:09Z",
            "2016-10-06T00:17:09",
            "2016-10-06T00:17:09.Z",
            "2016-13-06T00:17:09Z",
            "2016-02-30T00:17:09Z",
            "2016-10-06T24:17:09Z",
            "2016-10-06T00:17:09+2:00",
            "2016-10-06T00:17:09Zx",
        ] {
            assert_eq!(fixed(text), None, "{text}");
        }
    }

    #[test]
    fn times_beyond_the_range_of_nanoseconds_are_its_ends() {
        for (text, expected) in [
            ("0000-01-01T00:00:00+23:59", i64::MIN),
            ("0001-01-01T00:00:00Z", i64::MIN),
            ("1677-09-21T00:12:43.145224191Z", i64::MIN),
            ("1677-09-21T00:12:43.145224192Z", i64::MIN),
            ("1677-09-21T00:12:43.145224193Z", i64::MIN + 1),
            ("2262-04-11T23:47:16.854775807Z", i64::MAX),
            ("9999-12-31T23:59:59.999999999-23:59", i64::MAX),
        ] {
            assert_eq!(Stamp::parse(text.as_bytes()).map(|stamp| stamp.nanos), Some(expected), "{text}");
        }
    }

    proptest! {
        #[test]
        fn the_moment_is_the_calendars(nanos in -2_000_000_000_000_000_000_i64..8_000_000_000_000_000_000) {
            let text = Timestamp::from_nanosecond(i128::from(nanos)).unwrap().to_string();
            prop_assert_eq!(Stamp::parse(text.as_bytes()).unwrap().nanos, nanos);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = Stamp::parse(&bytes);
        }
    }
}
