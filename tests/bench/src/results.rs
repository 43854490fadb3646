//! What was measured, and its summary: pure arithmetic.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::exposition::Buckets;

/// What a number means.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Metric {
    /// Exit of a process to the start of the next one.
    Restart,
    /// Exit of a process to the moment it was known.
    Notice,
    /// First process of a chain to the main one, one chain at a time.
    Chain,
    /// The same, ten chains at a time.
    Chains,
    /// Start of the agent to the last pod's process.
    StartAll,
    /// Start of the agent to its being healthy.
    Ready,
    /// Processor seconds of the idle agent, per minute.
    IdleAgentCpu,
    /// Processor seconds of the runtime meanwhile, per minute.
    IdleRuntimeCpu,
    /// CRI calls meanwhile, per minute.
    IdleCalls,
    /// Resident memory of the idle agent, MiB.
    IdleMemory,
    /// Requests to the API server meanwhile, per minute.
    IdleRequests,
    /// Start of the agent to its node being Ready in the API server.
    NodeReady,
    /// First of many pods created to the last one Ready.
    AllReady,
    /// A pod deleted to its object gone.
    Gone,
    /// Exit of a process to its container being terminated in the API server.
    Terminated,
    /// Pods that end by themselves, one created when the last one has succeeded.
    OneShots,
}

impl Metric {
    /// All, in the order of the report.
    pub(super) const ALL: [Self; 16] = [
        Self::NodeReady,
        Self::AllReady,
        Self::Gone,
        Self::Terminated,
        Self::OneShots,
        Self::Restart,
        Self::Notice,
        Self::Chain,
        Self::Chains,
        Self::StartAll,
        Self::Ready,
        Self::IdleAgentCpu,
        Self::IdleRuntimeCpu,
        Self::IdleCalls,
        Self::IdleMemory,
        Self::IdleRequests,
    ];

    /// Heading of its table.
    pub(super) fn title(self, pods: u32) -> String {
        match self {
            Self::Restart => format!("container exit to restarted process, {pods} pods crash once"),
            Self::Notice => {
                "process gone to being known (agents: to the PLEG event, from their own histogram)".to_owned()
            }
            Self::Chain => "4 instant init containers then main, one pod".to_owned(),
            Self::Chains => "4 instant init containers then main, 10 pods at once".to_owned(),
            Self::StartAll => format!("{pods} pods, agent start to all running"),
            Self::Ready => "agent start to healthy".to_owned(),
            Self::IdleAgentCpu => format!("{pods} idle pods: CPU of the agent per minute"),
            Self::IdleRuntimeCpu => format!("{pods} idle pods: CPU of the runtime per minute"),
            Self::IdleCalls => format!("{pods} idle pods: CRI calls per minute"),
            Self::IdleMemory => format!("{pods} idle pods: resident memory of the agent"),
            Self::IdleRequests => format!("{pods} idle pods: requests to the API server per minute"),
            Self::NodeReady => "agent start to node Ready".to_owned(),
            Self::AllReady => format!("{pods} pods bound at once, first one created to all Ready"),
            Self::Gone => format!("{pods} pods deleted at once, each deleted to gone"),
            Self::Terminated => format!("{pods} pods, process exit to terminated in a watch"),
            Self::OneShots => "10 one-shot pods, one after the other".to_owned(),
        }
    }

    /// One value per column, so that there are no quantiles to show.
    pub(super) fn is_single(self) -> bool {
        use Metric::{IdleAgentCpu, IdleCalls, IdleMemory, IdleRequests, IdleRuntimeCpu};
        matches!(self, IdleAgentCpu | IdleRuntimeCpu | IdleCalls | IdleMemory | IdleRequests)
    }

    /// A value as people read it.
    pub(super) fn show(self, value: f64) -> String {
        match self {
            Self::IdleAgentCpu | Self::IdleRuntimeCpu => format!("{value:.2} s"),
            Self::IdleCalls | Self::IdleRequests => format!("{value:.0}"),
            Self::IdleMemory => format!("{value:.1} MiB"),
            _ if value.is_infinite() => "beyond".to_owned(),
            _ if value.abs() < 1.0 => format!("{:.1} ms", value * 1e3),
            _ => format!("{value:.2} s"),
        }
    }
}

/// The values of one metric in one column.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Series {
    /// Each value.
    Values(Vec<f64>),
    /// Counts up to each bound, where there is no more to have.
    Buckets(Buckets),
}

/// What tables show.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    pub(super) count: u64,
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl Series {
    /// `None` if there is nothing in it.
    pub(super) fn summary(&self) -> Option<Summary> {
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
                    match buckets.iter_mut().find(|(known, _)| *known == bound) {
                        Some((_, known)) => *known += count,
                        None => buckets.push((bound, count)),
                    }
                }
                buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            }
            (this, other) => *this = other,
        }
    }
}

/// In millionths and four significant digits.
fn of_values(values: &[f64]) -> Option<Summary> {
    let mut histogram = Histogram::<u64>::new(4).ok()?;
    for value in values {
        histogram.record((value.max(0.0) * 1e6).round() as u64).ok()?;
    }
    let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e6;
    let max = values.iter().copied().reduce(f64::max)?;
    Some(Summary { count: histogram.len(), p50: at(0.5), p90: at(0.9), p99: at(0.99), max })
}

/// The upper bound of the bucket that a quantile falls into: never better than it was.
fn of_buckets(buckets: &Buckets) -> Option<Summary> {
    let count: u64 = buckets.iter().map(|(_, count)| count).sum();
    let at = |quantile: f64| {
        let rank = ((count as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        buckets.iter().find_map(|(bound, count)| {
            seen += count;
            (seen >= rank).then_some(*bound)
        })
    };
    if count == 0 {
        return None;
    }
    Some(Summary { count, p50: at(0.5)?, p90: at(0.9)?, p99: at(0.99)?, max: at(1.0)? })
}

/// All series, and what went wrong.
#[derive(Debug, Default)]
pub(super) struct Results {
    series: BTreeMap<(Metric, String), Series>,
    /// A sentence for each thing that went wrong, with its column and workload.
    pub(super) failures: Vec<String>,
}

impl Results {
    /// Adds values to what is known of a metric in a column.
    pub(super) fn add(&mut self, metric: Metric, column: &str, series: Series) {
        let key = (metric, column.to_owned());
        match self.series.get_mut(&key) {
            Some(known) => known.merge(series),
            None => drop(self.series.insert(key, series)),
        }
    }

    /// What was measured of a metric in a column.
    pub(super) fn get(&self, metric: Metric, column: &str) -> Option<&Series> {
        self.series.get(&(metric, column.to_owned()))
    }

    /// Its summary.
    pub(super) fn summary(&self, metric: Metric, column: &str) -> Option<Summary> {
        self.get(metric, column)?.summary()
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
    fn buckets_are_never_better_than_they_were() {
        let buckets = vec![(0.001, 50), (0.002, 48), (0.01, 1), (f64::INFINITY, 1)];
        let summary = Series::Buckets(buckets).summary().unwrap();
        assert_eq!((summary.p50, summary.p90, summary.p99, summary.max), (0.001, 0.002, 0.01, f64::INFINITY));
        assert_eq!(Series::Buckets(vec![(1.0, 0)]).summary(), None);
    }

    #[test]
    fn rounds_add_up() {
        let mut results = Results::default();
        results.add(Metric::Restart, "a", Series::Values(vec![1.0]));
        results.add(Metric::Restart, "a", Series::Values(vec![3.0]));
        results.add(Metric::Restart, "b", Series::Values(vec![9.0]));
        results.add(Metric::Notice, "a", Series::Buckets(vec![(1.0, 1), (2.0, 1)]));
        results.add(Metric::Notice, "a", Series::Buckets(vec![(2.0, 3), (3.0, 1)]));
        assert_eq!(results.get(Metric::Restart, "a"), Some(&Series::Values(vec![1.0, 3.0])));
        assert_eq!(results.get(Metric::Notice, "a"), Some(&Series::Buckets(vec![(1.0, 1), (2.0, 4), (3.0, 1)])));
        assert_eq!(results.get(Metric::Chain, "a"), None);
    }

    #[test]
    fn units() {
        assert_eq!(Metric::Restart.show(0.0654), "65.4 ms");
        assert_eq!(Metric::Restart.show(1.234), "1.23 s");
        assert_eq!(Metric::Notice.show(f64::INFINITY), "beyond");
        assert_eq!(Metric::IdleAgentCpu.show(0.05), "0.05 s");
        assert_eq!(Metric::IdleMemory.show(19.96), "20.0 MiB");
    }
}
