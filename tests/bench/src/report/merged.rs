//! Figures over several runs: the median of each quantile, and its least and greatest value. Pure.

use anyhow::bail;
use serde::Serialize;

use super::Environment;
use super::run::Measured;
use super::run::Quantiles;
use super::run::RunDocument;
use crate::metric::Unit;

/// The merged figures of runs of one benchmark.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Merged {
    pub(super) benchmark: String,
    /// Usually one.
    pub(super) commits: Vec<String>,
    /// That of the first run.
    pub(super) environment: Environment,
    pub(super) participants: Vec<String>,
    pub(super) references: Vec<String>,
    pub(super) measured: Vec<MergedMetric>,
    pub(super) failures: Vec<String>,
}

/// One metric of one participant.
#[derive(Clone, Debug, Serialize)]
pub(super) struct MergedMetric {
    pub(super) metric: String,
    pub(super) title: String,
    pub(super) unit: Unit,
    pub(super) participant: String,
    /// Runs that measured it.
    pub(super) runs: usize,
    pub(super) p50: Option<Spread>,
    pub(super) p90: Option<Spread>,
    pub(super) p99: Option<Spread>,
    pub(super) max: Option<Spread>,
}

/// One quantile over the runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    /// `None` if a value is missing.
    fn of(values: impl Iterator<Item = Option<f64>>) -> Option<Self> {
        let mut values = values.collect::<Option<Vec<f64>>>()?;
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Some(Self { median, min, max })
    }
}

impl Merged {
    /// Merges runs; they may have measured different parts.
    ///
    /// # Errors
    /// There are no runs, or they are of different benchmarks or pod counts.
    pub(super) fn of(runs: &[RunDocument]) -> anyhow::Result<Self> {
        let Some(first) = runs.first() else { bail!("there are no runs to report") };
        if let Some(other) = runs.iter().find(|run| run.benchmark != first.benchmark) {
            bail!("runs of {} and {} cannot be merged", first.benchmark, other.benchmark);
        }
        let participants = union(runs, |run| &run.participants);
        let all: Vec<&Measured> = runs.iter().flat_map(|run| &run.measured).collect();
        let mut measured = Vec::new();
        for metric in in_order(&all) {
            for participant in &participants {
                let same: Vec<_> =
                    all.iter().filter(|m| m.metric == metric && m.participant == *participant).copied().collect();
                measured.extend(merge(&same)?);
            }
        }
        Ok(Self {
            benchmark: first.benchmark.clone(),
            commits: union(runs, |run| std::slice::from_ref(&run.commit)),
            environment: first.environment.clone(),
            participants,
            references: union(runs, |run| &run.references),
            measured,
            failures: runs.iter().flat_map(|run| run.failures.iter().cloned()).collect(),
        })
    }

    /// Median p50 of a participant over that of `reference`.
    pub(super) fn ratio(&self, of: &MergedMetric, reference: &str) -> Option<f64> {
        let same = |other: &&MergedMetric| other.metric == of.metric && other.participant == reference;
        let reference = self.measured.iter().find(same)?.p50?.median;
        (reference > 0.0).then_some(of.p50?.median / reference)
    }
}

fn merge(same: &[&Measured]) -> anyhow::Result<Option<MergedMetric>> {
    let Some(first) = same.first() else { return Ok(None) };
    if let Some(other) = same.iter().find(|other| other.title != first.title) {
        bail!("runs of \"{}\" and \"{}\" cannot be merged", first.title, other.title);
    }
    let spread = |quantile: fn(&Quantiles) -> Option<f64>| Spread::of(same.iter().map(|m| quantile(&m.summary)));
    Ok(Some(MergedMetric {
        metric: first.metric.clone(),
        title: first.title.clone(),
        unit: first.unit,
        participant: first.participant.clone(),
        runs: same.len(),
        p50: spread(|q| q.p50),
        p90: spread(|q| q.p90),
        p99: spread(|q| q.p99),
        max: spread(|q| q.max),
    }))
}

/// Identifiers of the metrics in the order of the report.
fn in_order(all: &[&Measured]) -> Vec<String> {
    let order = crate::metric::Metric::ALL.map(super::run::identifier);
    order.into_iter().filter(|metric| all.iter().any(|measured| measured.metric == *metric)).collect()
}

/// All values in the order of their first appearance.
fn union(runs: &[RunDocument], values: fn(&RunDocument) -> &[String]) -> Vec<String> {
    let mut union: Vec<String> = Vec::new();
    for value in runs.iter().flat_map(values) {
        if !union.contains(value) {
            union.push(value.clone());
        }
    }
    union
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::tests::results;
    use super::super::tests::setup;
    use super::*;

    fn run(restart: [f64; 3]) -> RunDocument {
        RunDocument::new(&setup(Path::new("")), &results(restart))
    }

    #[test]
    fn quantiles_are_merged_over_runs() {
        let runs = [run([0.07, 0.08, 0.3]), run([0.07, 0.10, 0.2]), run([0.07, 0.09, 0.4])];
        let merged = Merged::of(&runs).unwrap();
        let keblet = merged.measured.iter().find(|m| m.metric == "exit_to_restarted" && m.participant == "keblet");
        let keblet = keblet.unwrap();
        let close = |spread: Option<Spread>, [median, min, max]: [f64; 3]| {
            let spread = spread.unwrap();
            [(spread.median, median), (spread.min, min), (spread.max, max)]
                .iter()
                .all(|(value, expected)| (value - expected).abs() < 1e-4)
        };
        assert!(close(keblet.p50, [0.09, 0.08, 0.10]), "{:?}", keblet.p50);
        assert!(close(keblet.max, [0.3, 0.2, 0.4]), "{:?}", keblet.max);
        assert_eq!((keblet.runs, merged.commits.as_slice()), (3, ["abc".to_owned()].as_slice()));
        let ratio = merged.ratio(keblet, "bare client").unwrap();
        assert!((ratio - 0.09 / 0.068).abs() < 1e-3, "{ratio}");
        let noticed = merged.measured.iter().find(|m| m.metric == "exit_to_noticed").unwrap();
        assert_eq!(noticed.max, None, "beyond the last bound in some run");
    }

    #[test]
    fn an_even_number_of_runs_has_the_mean_of_the_two_in_the_middle() {
        let spread = Spread::of([Some(4.0), Some(1.0)].into_iter()).unwrap();
        assert_eq!(spread, Spread { median: 2.5, min: 1.0, max: 4.0 });
        assert_eq!(Spread::of([Some(4.0), None].into_iter()), None);
    }

    #[test]
    fn different_benchmarks_and_pod_counts_are_rejected() {
        let mut other = run([0.1, 0.1, 0.1]);
        other.benchmark = "cluster".to_owned();
        assert!(Merged::of(&[run([0.1, 0.1, 0.1]), other]).is_err());
        let mut other = run([0.1, 0.1, 0.1]);
        other.measured[0].title = "40 pods".to_owned();
        assert!(Merged::of(&[run([0.1, 0.1, 0.1]), other]).is_err());
        assert!(Merged::of(&[]).is_err());
    }
}
