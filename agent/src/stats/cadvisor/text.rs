//! The text format of metrics, written sample by sample
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/>). Pure.

use std::borrow::Cow;
use std::io::Write as _;

use prometheus::proto::MetricType;

use crate::stats::family::Family;

/// A page of samples.
#[derive(Debug, Default)]
pub(super) struct Text {
    bytes: Vec<u8>,
    name: &'static str,
    /// What comes before the first sample of the family.
    head: Option<(&'static str, MetricType)>,
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
                let comma = if index == 0 && labels.is_empty() { "" } else { "," };
                self.write(format_args!("{comma}{label}=\"{}\"", escaped(value)));
            }
            self.bytes.push(b'}');
        }
        match at {
            Some(at) => self.write(format_args!(" {value} {}\n", at.div_euclid(1_000_000))),
            None => self.write(format_args!(" {value}\n")),
        }
    }

    /// A whole family.
    pub(super) fn family(&mut self, family: &Family) {
        self.begin(family.name(), family.help(), family.kind());
        for (labels, value) in family.samples() {
            let labels: Vec<(&str, &str)> = labels.iter().map(|pair| (pair.name(), pair.value())).collect();
            self.sample("", &labels, value, None);
        }
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
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
        assert_eq!(String::from_utf8(text.into_bytes()).unwrap(), expected);
    }
}
