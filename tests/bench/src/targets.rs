//! What keblet promises, as ratios to a column of the same run or as figures.

use super::results::Metric;
use super::results::Results;
use super::results::Summary;

/// A promise and how it went.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Verdict {
    /// The promise in words.
    pub(super) promise: String,
    /// The measured figure.
    pub(super) measured: f64,
    /// The figure it must not exceed.
    pub(super) limit: f64,
}

impl Verdict {
    /// The promise was kept.
    pub(super) fn is_kept(&self) -> bool {
        self.measured <= self.limit
    }
}

enum Limit {
    /// This many times the same figure of another column.
    Times(f64, &'static str),
    /// This much more than the same figure of another column.
    Above(f64, &'static str),
    /// The figure itself.
    Figure(f64),
}

struct Target {
    column: &'static str,
    metric: Metric,
    figure: (&'static str, fn(&Summary) -> f64),
    limit: Limit,
}

const P50: (&str, fn(&Summary) -> f64) = ("p50", |summary| summary.p50);
const P99: (&str, fn(&Summary) -> f64) = ("p99", |summary| summary.p99);
const MAX: (&str, fn(&Summary) -> f64) = ("max", |summary| summary.max);

const TARGETS: [Target; 22] = [
    Target { column: "evented", metric: Metric::Restart, figure: P50, limit: Limit::Times(1.1, "kernel floor") },
    Target { column: "evented", metric: Metric::Restart, figure: MAX, limit: Limit::Times(1.5, "kernel floor") },
    Target { column: "no kernel", metric: Metric::Restart, figure: P50, limit: Limit::Times(1.1, "event floor") },
    Target { column: "evented", metric: Metric::Chain, figure: P50, limit: Limit::Times(1.1, "kernel floor") },
    Target { column: "evented", metric: Metric::Chains, figure: P50, limit: Limit::Times(1.05, "event floor") },
    Target { column: "evented", metric: Metric::Notice, figure: P50, limit: Limit::Figure(0.002) },
    Target { column: "evented", metric: Metric::Notice, figure: P99, limit: Limit::Figure(0.010) },
    Target { column: "evented", metric: Metric::StartAll, figure: P50, limit: Limit::Times(1.2, "event floor") },
    Target { column: "evented", metric: Metric::Ready, figure: P50, limit: Limit::Figure(0.2) },
    Target { column: "evented", metric: Metric::IdleAgentCpu, figure: MAX, limit: Limit::Figure(0.1) },
    Target { column: "evented", metric: Metric::IdleRuntimeCpu, figure: MAX, limit: Limit::Above(0.05, "event floor") },
    Target { column: "evented", metric: Metric::IdleMemory, figure: MAX, limit: Limit::Figure(20e6 / 1048576.0) },
    Target { column: "keblet", metric: Metric::NodeReady, figure: P50, limit: Limit::Figure(0.3) },
    Target { column: "keblet", metric: Metric::AllReady, figure: P50, limit: Limit::Times(1.2, "runtime floor") },
    Target { column: "keblet", metric: Metric::Gone, figure: P50, limit: Limit::Times(0.2, "kubelet") },
    Target { column: "keblet", metric: Metric::Terminated, figure: P50, limit: Limit::Figure(0.030) },
    Target { column: "keblet", metric: Metric::Terminated, figure: MAX, limit: Limit::Figure(0.100) },
    Target { column: "keblet", metric: Metric::OneShots, figure: P50, limit: Limit::Times(0.2, "kubelet") },
    Target { column: "keblet", metric: Metric::IdleRequests, figure: MAX, limit: Limit::Times(1.0, "kubelet") },
    Target { column: "keblet", metric: Metric::IdleMemory, figure: MAX, limit: Limit::Figure(30e6 / 1048576.0) },
    Target { column: "keblet", metric: Metric::IdleAgentCpu, figure: MAX, limit: Limit::Figure(0.15) },
    Target { column: "keblet", metric: Metric::Gone, figure: P50, limit: Limit::Figure(0.4) },
];

/// How the promises went, as far as this run has their figures.
pub(super) fn judge(results: &Results) -> Vec<Verdict> {
    TARGETS.iter().filter_map(|target| verdict(target, results)).collect()
}

fn verdict(target: &Target, results: &Results) -> Option<Verdict> {
    let (name, figure) = target.figure;
    let measured = figure(&results.summary(target.metric, target.column)?);
    let other = |column| Some(figure(&results.summary(target.metric, column)?));
    let (limit, words) = match target.limit {
        Limit::Times(times, column) => (times * other(column)?, format!("{times} × {column}")),
        Limit::Above(more, column) => (more + other(column)?, format!("{column} + {}", target.metric.show(more))),
        Limit::Figure(figure) => (figure, target.metric.show(figure)),
    };
    let promise = format!("{:?} {name} of {} ≤ {words}", target.metric, target.column);
    Some(Verdict { promise, measured, limit })
}

#[cfg(test)]
mod tests {
    use super::super::results::Series;
    use super::*;

    #[test]
    fn promises_need_both_columns() {
        let mut results = Results::default();
        results.add(Metric::Restart, "evented", Series::Values(vec![0.070, 0.072, 0.120]));
        assert_eq!(judge(&results), []);

        results.add(Metric::Restart, "kernel floor", Series::Values(vec![0.068, 0.070, 0.075]));
        let verdicts = judge(&results);
        assert_eq!(verdicts.iter().map(Verdict::is_kept).collect::<Vec<_>>(), [true, false]);
        assert_eq!(verdicts[0].promise, "Restart p50 of evented ≤ 1.1 × kernel floor");

        results.add(Metric::IdleRuntimeCpu, "event floor", Series::Values(vec![0.2]));
        results.add(Metric::IdleRuntimeCpu, "evented", Series::Values(vec![0.24]));
        assert!(judge(&results).last().unwrap().is_kept());
    }
}
