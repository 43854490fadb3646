//! The text format of metrics, written sample by sample
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>). Pure.

use std::borrow::Cow;
use std::io;
use std::io::Write as _;

use prometheus::proto::MetricType;

use crate::stats::family::Family;

/// Whole numbers below it are exact as floating point numbers.
const EXACT: u64 = 1 << 53;

/// A page of samples.
#[derive(Debug, Default)]
pub(super) struct Text {
    bytes: Vec<u8>,
    name: &'static str,
    /// What comes before the first sample of the family.
    head: Option<(&'static str, MetricType)>,
    /// The last time, in nanoseconds since the Unix epoch, and as it is written: most samples have the same.
    time: Option<(i64, String)>,
}

impl Text {
    /// The following samples are of this family. Families without a sample are omitted.
    pub(super) fn begin(&mut self, name: &'static str, help: &'static str, kind: MetricType) {
        self.name = name;
        self.head = Some((help, kind));
    }

    /// A sample with the labels of its row, as they are written, and more. `at`: nanoseconds since the Unix epoch.
    pub(super) fn sample(&mut self, labels: &str, more: &[(&str, &str)], value: f64, at: Option<i64>) {
        let name = self.name;
        if let Some((help, kind)) = self.head.take() {
            let kind = if kind == MetricType::COUNTER { "counter" } else { "gauge" };
            self.write(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        }
        self.bytes.extend_from_slice(name.as_bytes());
        if !labels.is_empty() || !more.is_empty() {
            self.bytes.push(b'{');
            self.bytes.extend_from_slice(labels.as_bytes());
            for (index, (label, value)) in more.iter().enumerate() {
                if index > 0 || !labels.is_empty() {
                    self.bytes.push(b',');
                }
                self.bytes.extend_from_slice(label.as_bytes());
                self.bytes.extend_from_slice(b"=\"");
                self.bytes.extend_from_slice(escaped(value).as_bytes());
                self.bytes.push(b'"');
            }
            self.bytes.push(b'}');
        }
        self.bytes.push(b' ');
        self.number(value);
        if let Some(at) = at {
            self.time(at);
        }
        self.bytes.push(b'\n');
    }

    /// A whole family.
    pub(super) fn family(&mut self, family: &Family) {
        self.begin(family.name(), family.help(), family.kind());
        for (labels, value) in family.samples() {
            let labels: Vec<(&str, &str)> = labels.iter().map(|pair| (pair.name(), pair.value())).collect();
            self.sample("", &labels, value, None);
        }
    }

    /// Writes what there is so far, and goes on with an empty page.
    ///
    /// # Errors
    /// Those of the writer.
    pub(super) fn move_to(&mut self, out: &mut impl io::Write) -> io::Result<()> {
        out.write_all(&self.bytes)?;
        self.bytes.clear();
        Ok(())
    }

    /// Most values are whole numbers, which take less time to write as integers.
    fn number(&mut self, value: f64) {
        let whole = value as i64;
        let is_exact = whole.unsigned_abs() < EXACT && whole as f64 == value;
        // Zero has a negative form too.
        if is_exact && (whole != 0 || value.is_sign_positive()) {
            self.write(format_args!("{whole}"));
        } else {
            self.write(format_args!("{value}"));
        }
    }

    /// The time of a sample, after a space.
    fn time(&mut self, at: i64) {
        let is_known = self.time.as_ref().is_some_and(|(last, _)| *last == at);
        if !is_known {
            self.time = Some((at, format!(" {}", at.div_euclid(1_000_000))));
        }
        let text = self.time.as_ref().map_or("", |(_, text)| text.as_str());
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn write(&mut self, arguments: std::fmt::Arguments<'_>) {
        let written = self.bytes.write_fmt(arguments);
        debug_assert!(written.is_ok(), "writing to memory cannot fail");
    }
}

/// A label's value with backslashes, quotes and line ends escaped.
pub(super) fn escaped(value: &str) -> Cow<'_, str> {
    if !value.contains(['\\', '"', '\n']) {
        return Cow::Borrowed(value);
    }
    Cow::Owned(value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_labels_and_times() {
        let mut text = Text::default();
        text.begin("empty", "Nothing.", MetricType::GAUGE);
        text.begin("seen", "Something.", MetricType::COUNTER);
        text.sample("a=\"1\"", &[("b", "x\"\\\ny")], 2.5, Some(1_500_000_001));
        text.sample("", &[], 1e18, None);
        text.sample("", &[("c", "")], 0.0, None);
        let expected = "# HELP seen Something.\n# TYPE seen counter\nseen{a=\"1\",b=\"x\\\"\\\\\\ny\"} 2.5 1500\n\
                        seen 1000000000000000000\nseen{c=\"\"} 0\n";
        assert_eq!(String::from_utf8(text.bytes).unwrap(), expected);
    }

    #[test]
    fn numbers_are_written_as_floating_point_numbers_are() {
        let exact = 9_007_199_254_740_992.0;
        let whole = [0.0, 1.0, 600.0, 1_767_225_600.0, exact - 1.0, exact, exact + 2.0, 1e18, 1e19, 1e300];
        let others = [0.5, 2.5, 0.1 + 0.2, 1e-9, 1_234_567.891, f64::MIN_POSITIVE, f64::INFINITY, f64::NAN];
        for value in whole.into_iter().chain(others).flat_map(|value| [value, -value]) {
            let mut text = Text::default();
            text.number(value);
            assert_eq!(String::from_utf8(text.bytes).unwrap(), value.to_string());
        }
    }

    #[test]
    fn each_sample_has_its_own_time() {
        let mut text = Text::default();
        text.begin("a", "A.", MetricType::GAUGE);
        for at in [Some(0), None, Some(0), Some(1_999_999), Some(2_000_000), Some(-1)] {
            text.sample("", &[], 1.0, at);
        }
        let text = String::from_utf8(text.bytes).unwrap();
        let samples: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(samples, ["a 1 0", "a 1", "a 1 0", "a 1 1", "a 1 2", "a 1 -1"]);
    }
}
