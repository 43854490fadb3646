//! Measured values and their summary. Pure.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::exposition::Buckets;
use super::metric::Metric;

/// The values of one metric of one participant.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Series {
    /// All values.
    Values(Vec<f64>),
    /// Counts up to each bound, from an agent's own histogram.
    Buckets(Buckets),
}

/// Quantiles of a series.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) count: u64,
    pub(crate) p50: f64,
    pub(crate) p90: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Series {
    /// `None` for an empty series.
    pub(crate) fn summary(&self) -> Option<Summary> {
        match self {
            Self::Values(values) => of_values(values),
            Self::Buckets(buckets) => of_buckets(buckets),
        }
    }

    fn merge(&mut self, other: Self) {
        match (self, other) {
            (Self::Values(values), Self::Values(more)) => values.extend(more),
            (Self::Buckets(buckets), Self::Buckets(more)) => {
                for (bound, count) in more {
                    match buckets.iter_mut().find(|(existing, _)| *existing == bound) {
                        Some((_, existing)) => *existing += count,
                        None => buckets.push((bound, count)),
                    }
                }
                buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            }
            (this, other) => *this = other,
        }
    }
}

/// Values are stored in millionths with four significant digits.
fn of_values(values: &[f64]) -> Option<Summary> {
    let mut histogram = Histogram::<u64>::new(4).ok()?;
    for value in values {
        histogram.record((value.max(0.0) * 1e6).round() as u64).ok()?;
    }
    let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e6;
    let max = values.iter().copied().reduce(f64::max)?;
    Some(Summary { count: histogram.len(), p50: at(0.5), p90: at(0.9), p99: at(0.99), max })
}

/// Takes the upper bound of the bucket of a quantile, so that no quantile is understated.
fn of_buckets(buckets: &Buckets) -> Option<Summary> {
    let count: u64 = buckets.iter().map(|(_, count)| count).sum();
    let at = |quantile: f64| {
        let rank = ((count as f64 * quantile).ceil() as u64).max(1);
        let mut cumulative = 0;
        buckets.iter().find_map(|(bound, count)| {
            cumulative += count;
            (cumulative >= rank).then_some(*bound)
        })
    };
    if count == 0 {
        return None;
    }
    Some(Summary { count, p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)?, max: at(1.0)? })
}

/// All series, and the failures.
#[derive(Clone, Debug, Default)]
pub(crate) struct Results {
    series: BTreeMap<(Metric, String), Series>,
    /// A sentence for each failure, with its participant and workload.
    pub(crate) failures: Vec<String>,
}

impl Results {
    /// Adds values to the series of a metric and participant.
    pub(crate) fn add(&mut self, metric: Metric, participant: &str, series: Series) {
        let key = (metric, participant.to_owned());
        match self.series.get_mut(&key) {
            Some(existing) => existing.merge(series),
            None => drop(self.series.insert(key, series)),
        }
    }

    /// Adds everything of another run.
    pub(crate) fn pool(&mut self, other: &Self) {
        for ((metric, participant), series) in &other.series {
            self.add(*metric, participant, series.clone());
        }
        self.failures.extend(other.failures.iter().cloned());
    }

    /// The series of a metric and participant.
    pub(crate) fn get(&self, metric: Metric, participant: &str) -> Option<&Series> {
        self.series.get(&(metric, participant.to_owned()))
    }

    /// Its summary.
    pub(crate) fn summary(&self, metric: Metric, participant: &str) -> Option<Summary> {
        self.get(metric, participant)?.summary()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_summarised() {
        let values: Vec<f64> = (1..=100).map(|n| f64::from(n) / 1000.0).collect();
        let summary = Series::Values(values).summary().unwrap();
        assert_eq!((summary.count, summary.max), (100, 0.1));
        for (quantile, expected) in [(summary.p50, 0.05), (summary.p90, 0.09), (summary.p99, 0.099)] {
            assert!((quantile - expected).abs() < expected * 1e-4, "{quantile} instead of {expected}");
        }
        assert_eq!(Series::Values(vec![]).summary(), None);
    }

    #[test]
    fn buckets_never_understate_a_quantile() {
        let buckets = vec![(0.001, 50), (0.002, 48), (0.01, 1), (f64::INFINITY, 1)];
        let summary = Series::Buckets(buckets).summary().unwrap();
        assert_eq!((summary.p50, summary.p90, summary.p99, summary.max), (0.001, 0.002, 0.01, f64::INFINITY));
        assert_eq!(Series::Buckets(vec![(1.0, 0)]).summary(), None);
    }

    #[test]
    fn runs_are_pooled() {
        let mut first = Results::default();
        first.add(Metric::ExitToRestarted, "a", Series::Values(vec![1.0]));
        first.add(Metric::ExitToNoticed, "a", Series::Buckets(vec![(1.0, 1), (2.0, 1)]));
        let mut second = Results::default();
        second.add(Metric::ExitToRestarted, "a", Series::Values(vec![3.0]));
        second.add(Metric::ExitToRestarted, "b", Series::Values(vec![9.0]));
        second.add(Metric::ExitToNoticed, "a", Series::Buckets(vec![(2.0, 3), (3.0, 1)]));
        second.failures.push("b failed".to_owned());
        first.pool(&second);
        assert_eq!(first.get(Metric::ExitToRestarted, "a"), Some(&Series::Values(vec![1.0, 3.0])));
        let buckets = Series::Buckets(vec![(1.0, 1), (2.0, 4), (3.0, 1)]);
        assert_eq!(first.get(Metric::ExitToNoticed, "a"), Some(&buckets));
        assert_eq!(first.get(Metric::InitChain, "a"), None);
        assert_eq!(first.failures, ["b failed"]);
    }
}
