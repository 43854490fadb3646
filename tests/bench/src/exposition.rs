//! Parses an agent's metrics: the Prometheus text format, as far as sums and histograms need it.

use std::collections::BTreeMap;

/// Samples by metric name.
#[derive(Debug, Default)]
pub(crate) struct Exposition {
    samples: BTreeMap<String, Vec<(Labels, f64)>>,
}

type Labels = BTreeMap<String, String>;

/// Observations up to and including each bound, in ascending order of bounds; not cumulative.
pub(crate) type Buckets = Vec<(f64, u64)>;

impl Exposition {
    /// Skips comments and lines that are not samples.
    pub(crate) fn parse(text: &str) -> Self {
        let mut exposition = Self::default();
        for (name, labels, value) in text.lines().filter_map(sample) {
            exposition.samples.entry(name).or_default().push((labels, value));
        }
        exposition
    }

    /// Sum of a counter over all label values, `None` if there is no such metric.
    pub(crate) fn sum(&self, name: &str) -> Option<f64> {
        self.samples.get(name).map(|samples| samples.iter().map(|(_, value)| value).sum())
    }

    /// A histogram over all series that have all of `labels`; empty if there are none.
    pub(crate) fn histogram(&self, name: &str, labels: &[(&str, &str)]) -> Buckets {
        let mut cumulative: Vec<(f64, f64)> = Vec::new();
        let samples = self.samples.get(&format!("{name}_bucket")).map_or(&[][..], Vec::as_slice);
        for (has, value) in
            samples.iter().filter(|(has, _)| labels.iter().all(|(k, v)| has.get(*k).is_some_and(|h| h == v)))
        {
            let Some(bound) = has.get("le").and_then(|le| le.parse().ok()) else { continue };
            match cumulative.iter_mut().find(|(existing, _)| *existing == bound) {
                Some((_, count)) => *count += value,
                None => cumulative.push((bound, *value)),
            }
        }
        cumulative.sort_by(|a, b| a.0.total_cmp(&b.0));
        let below = std::iter::once(0.0).chain(cumulative.iter().map(|(_, count)| *count));
        cumulative.iter().zip(below).map(|((bound, count), below)| (*bound, (count - below).max(0.0) as u64)).collect()
    }
}

/// `name{label="value",...} value [timestamp]`
fn sample(line: &str) -> Option<(String, Labels, f64)> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let (name, rest) = line.split_at(line.find(['{', ' '])?);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => labels(inside)?,
        None => (Labels::new(), rest),
    };
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some((name.to_owned(), labels, value))
}

/// Labels up to the closing brace, and what follows it. `\"`, `\\` and `\n` are escapes.
fn labels(text: &str) -> Option<(Labels, &str)> {
    let mut labels = Labels::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, quoted) = rest.split_once("=\"")?;
        let mut value = String::new();
        let mut chars = quoted.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => match chars.next()?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        labels.insert(name.trim().to_owned(), value);
        rest = &quoted[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
# HELP calls_total Calls.
# TYPE calls_total counter
calls_total{operation_type="version"} 3
calls_total{operation_type="odd \"}\\ one",more="x"} 4 1700000000
plain 1.5e1
nonsense
delay_bucket{source="kernel",le="0.001"} 5
delay_bucket{source="kernel",le="+Inf"} 9
delay_bucket{source="kernel",le="0.01"} 8
delay_bucket{source="keblet polling",le="0.001"} 0
delay_bucket{source="keblet polling",le="0.01"} 1
delay_bucket{source="keblet polling",le="+Inf"} 1
"#;

    #[test]
    fn sums() {
        let read = Exposition::parse(TEXT);
        assert_eq!(read.sum("calls_total"), Some(7.0));
        assert_eq!(read.sum("plain"), Some(15.0));
        assert_eq!(read.sum("absent"), None);
    }

    #[test]
    fn histograms_are_selected_and_added() {
        let read = Exposition::parse(TEXT);
        assert_eq!(read.histogram("delay", &[("source", "kernel")]), [(0.001, 5), (0.01, 3), (f64::INFINITY, 1)]);
        assert_eq!(read.histogram("delay", &[]), [(0.001, 5), (0.01, 4), (f64::INFINITY, 1)]);
        assert_eq!(read.histogram("delay", &[("source", "none")]), []);
    }
}
