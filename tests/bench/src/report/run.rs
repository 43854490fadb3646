//! The JSON of one run: every value, and a summary.

use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;

use super::Environment;
use super::Setup;
use crate::metric::Unit;
use crate::results::Results;
use crate::results::Summary;

/// One run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RunDocument {
    pub(super) benchmark: String,
    pub(super) commit: String,
    pub(super) environment: Environment,
    pub(super) participants: Vec<String>,
    /// Reference participants of the ratios.
    pub(super) references: Vec<String>,
    pub(super) measured: Vec<Measured>,
    pub(super) failures: Vec<String>,
}

/// One metric of one participant.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) metric: String,
    pub(super) title: String,
    pub(super) unit: Unit,
    pub(super) participant: String,
    pub(super) summary: Quantiles,
    pub(super) series: Value,
}

/// Quantiles; `None` beyond the last bound of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Quantiles {
    pub(super) count: u64,
    pub(super) p50: Option<f64>,
    pub(super) p90: Option<f64>,
    pub(super) p99: Option<f64>,
    pub(super) max: Option<f64>,
}

impl From<Summary> for Quantiles {
    fn from(summary: Summary) -> Self {
        let finite = |value: f64| value.is_finite().then_some(value);
        let Summary { count, p50, p90, p99, max } = summary;
        Self { count, p50: finite(p50), p90: finite(p90), p99: finite(p99), max: finite(max) }
    }
}

impl RunDocument {
    /// The document of `results`.
    pub(super) fn new(setup: &Setup, results: &Results) -> Self {
        let mut measured = Vec::new();
        for metric in super::measured(results, &setup.participants) {
            for participant in &setup.participants {
                let Some(series) = results.get(metric, participant) else { continue };
                let Some(summary) = series.summary() else { continue };
                measured.push(Measured {
                    metric: identifier(metric),
                    title: metric.title(setup.counts),
                    unit: metric.unit(),
                    participant: participant.clone(),
                    summary: summary.into(),
                    series: serde_json::to_value(series).unwrap_or_default(),
                });
            }
        }
        Self {
            benchmark: setup.benchmark.to_owned(),
            commit: setup.commit.clone(),
            environment: setup.environment.clone(),
            participants: setup.participants.clone(),
            references: setup.references.clone(),
            measured,
            failures: results.failures.clone(),
        }
    }
}

/// Its name in JSON.
pub(super) fn identifier(metric: crate::metric::Metric) -> String {
    serde_json::to_value(metric).ok().and_then(|id| id.as_str().map(str::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::super::tests::results;
    use super::super::tests::setup;
    use super::*;

    #[test]
    fn values_are_kept() {
        let document = RunDocument::new(&setup(Path::new("")), &results([0.110, 0.111, 0.140]));
        let text = serde_json::to_string(&document).unwrap();
        let read: RunDocument = serde_json::from_str(&text).unwrap();
        let keblet = &read.measured[1];
        assert_eq!((keblet.metric.as_str(), keblet.participant.as_str()), ("exit_to_restarted", "keblet"));
        assert_eq!(keblet.series["values"], json!([0.110, 0.111, 0.140]));
        assert_eq!(keblet.summary.max, Some(0.140));
        let noticed = &read.measured[2];
        assert_eq!((noticed.summary.p50, noticed.summary.max), (Some(0.001), None), "beyond the last bound");
        assert_eq!((read.environment, read.commit.as_str()), (document.environment, "abc"));
    }
}
