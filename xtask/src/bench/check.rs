//! Compares the results of benchmarks with the promises.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use serde::Deserialize;

use super::promises;
use super::promises::Bound;
use super::promises::Promise;
use crate::report::Report;

/// The participant that the promises are about.
const PARTICIPANT: &str = "keblet";

/// The merged figures of one benchmark, as `keblet-bench` writes them.
#[derive(Deserialize)]
struct Results {
    benchmark: String,
    commits: Vec<String>,
    measured: Vec<Measured>,
    failures: Vec<String>,
}

#[derive(Deserialize)]
struct Measured {
    metric: String,
    participant: String,
    runs: usize,
    #[serde(flatten)]
    figures: BTreeMap<String, serde_json::Value>,
}

/// Prints each promise as met, missed or not measured; anything but met is a problem.
///
/// # Errors
/// The promises or a file of results cannot be read.
pub(super) fn check(repository: &Path, folder: &Path) -> Result<Report> {
    let path = repository.join("SPECIFICATION.md");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let promises = promises::parse(&text).with_context(|| format!("cannot read {}", path.display()))?;
    let mut benchmarks: Vec<&str> = promises.iter().map(|promise| promise.benchmark.as_str()).collect();
    benchmarks.sort_unstable();
    benchmarks.dedup();
    let mut results = Vec::new();
    for benchmark in benchmarks {
        let path = folder.join(format!("{benchmark}.json"));
        if path.exists() {
            let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            results.push(serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?);
        }
    }
    Ok(compare(&promises, &results))
}

fn compare(promises: &[Promise], results: &[Results]) -> Report {
    let mut report = Report::new(format!("{} promises", promises.len()));
    for Results { benchmark, commits, failures, .. } in results {
        println!("{benchmark}: commit {}", commits.join(", "));
        report.problems.extend(failures.iter().map(|failure| format!("failed: {benchmark}: {failure}")));
    }
    for promise in promises {
        match outcome(promise, results) {
            Outcome::Met(words) => println!("met: {words}"),
            Outcome::Missed(words) => report.problems.push(format!("MISSED: {words}")),
            Outcome::NotMeasured(words) => report.problems.push(format!("not measured: {words}")),
        }
    }
    report
}

#[derive(Debug, PartialEq)]
enum Outcome {
    Met(String),
    Missed(String),
    NotMeasured(String),
}

fn outcome(promise: &Promise, results: &[Results]) -> Outcome {
    let Promise { text, benchmark, metric, figure, bound } = promise;
    let name = format!("{text}: {benchmark}.{metric} {figure}");
    let measured = |participant: &str| {
        let results = results.iter().find(|results| results.benchmark == *benchmark)?;
        let same = |m: &&Measured| m.metric == *metric && m.participant == participant;
        let measured = results.measured.iter().find(same)?;
        Some((measured.figures.get(figure)?.get("median")?.as_f64()?, measured.runs))
    };
    let Some((value, runs)) = measured(PARTICIPANT) else {
        return Outcome::NotMeasured(name);
    };
    let limit = match bound {
        Bound::Value(limit) => Some(*limit),
        Bound::Times(times, reference) => measured(reference).map(|(other, _)| times * other),
        Bound::Above(more, reference) => measured(reference).map(|(other, _)| more + other),
    };
    let Some(limit) = limit else {
        return Outcome::NotMeasured(format!("{name}: the reference has no figure"));
    };
    let words = format!("{name} is {value:.4}, at most {limit:.4} ({runs} runs)");
    if value <= limit { Outcome::Met(words) } else { Outcome::Missed(words) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn results() -> Results {
        let measured = |participant: &str, median: f64| {
            json!({"metric": "delete_to_gone", "participant": participant, "runs": 5, "title": "x", "unit": "seconds",
                   "p50": {"median": median, "min": 1.0, "max": 9.0}, "max": null})
        };
        serde_json::from_value(json!({
            "benchmark": "cluster",
            "commits": ["abc"],
            "measured": [measured("bare client", 2.0), measured("keblet", 2.3)],
            "failures": [],
        }))
        .unwrap()
    }

    fn promise(figure: &str, bound: Bound) -> Promise {
        Promise {
            text: "deletion".to_owned(),
            benchmark: "cluster".to_owned(),
            metric: "delete_to_gone".to_owned(),
            figure: figure.to_owned(),
            bound,
        }
    }

    #[test]
    fn promises_are_met_missed_or_not_measured() {
        let of = |figure, bound| outcome(&promise(figure, bound), &[results()]);
        let times = |times| Bound::Times(times, "bare client".to_owned());
        assert!(matches!(of("p50", times(1.2)), Outcome::Met(words) if words.contains("2.3000, at most 2.4000")));
        assert!(matches!(of("p50", times(1.1)), Outcome::Missed(_)));
        assert!(matches!(of("p50", Bound::Value(2.3)), Outcome::Met(_)));
        assert!(matches!(of("p50", Bound::Above(0.2, "bare client".to_owned())), Outcome::Missed(_)));
        assert!(matches!(of("max", times(1.2)), Outcome::NotMeasured(_)));
        assert!(matches!(of("p50", Bound::Times(1.2, "kubelet".to_owned())), Outcome::NotMeasured(_)));
    }

    #[test]
    fn failures_of_a_benchmark_are_problems() {
        let mut failed = results();
        failed.failures.push("keblet: it ended".to_owned());
        let report = compare(&[promise("p50", Bound::Value(9.0))], &[failed]);
        assert_eq!(report.problems, ["failed: cluster: keblet: it ended"]);
    }

    #[test]
    fn the_promises_of_the_tree_can_be_read() {
        let text = fs::read_to_string(crate::paths::repository().join("SPECIFICATION.md")).unwrap();
        assert!(!promises::parse(&text).unwrap().is_empty());
    }
}
