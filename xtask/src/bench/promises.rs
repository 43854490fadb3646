//! The promises of SPECIFICATION.md: rows of the table below `## Speed and cost`. Pure.
//!
//! ```text
//! | Promise | Metric | Figure | Bound | Reference |
//! |---|---|---|---|---|
//! | 30 pods deleted at once | `cluster.delete_to_gone` | p50 | ≤ 1.2 × | bare client |
//! | an exit is seen         | `cluster.exit_to_terminated` | max | ≤ 60 ms | |
//! | idle cost in containerd | `cluster.idle_runtime_cpu` | p50 | ≤ + 0.05 s | bare client |
//! ```
//! `Metric` is a benchmark and one of its metrics, `Figure` p50, p90, p99 or max, each the median over the runs.
//! Bounds in s, ms, MiB or MB, or without a unit.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

const HEADING: &str = "## Speed and cost";
const COLUMNS: [&str; 5] = ["Promise", "Metric", "Figure", "Bound", "Reference"];
const FIGURES: [&str; 4] = ["p50", "p90", "p99", "max"];

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Promise {
    pub text: String,
    pub benchmark: String,
    pub metric: String,
    pub figure: String,
    pub bound: Bound,
}

/// The upper bound of a figure.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Bound {
    /// In the metric's own unit.
    Value(f64),
    /// A multiple of the same figure of another participant.
    Times(f64, String),
    /// An amount above the same figure of another participant.
    Above(f64, String),
}

/// Parses all promises.
///
/// # Errors
/// The section or its table is missing, or a row is malformed; the error quotes it.
pub(super) fn parse(specification: &str) -> Result<Vec<Promise>> {
    let (_, section) = specification.split_once(HEADING).with_context(|| format!("section {HEADING:?} is missing"))?;
    let section = section.split("\n## ").next().unwrap_or(section);
    let mut rows = section.lines().filter(|line| line.starts_with('|'));
    let heading = rows.next().map(cells).unwrap_or_default();
    if heading != COLUMNS {
        bail!("the table below {HEADING:?} has the columns {heading:?} instead of {COLUMNS:?}");
    }
    rows.filter(|row| !is_rule(row)).map(|row| promise(row).with_context(|| format!("row {row:?}"))).collect()
}

fn cells(row: &str) -> Vec<String> {
    row.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

fn is_rule(row: &str) -> bool {
    row.chars().all(|character| "|-: ".contains(character))
}

fn promise(row: &str) -> Result<Promise> {
    let cells = cells(row);
    let [text, metric, figure, bound, reference] = cells.as_slice() else {
        bail!("has {} cells instead of {}", cells.len(), COLUMNS.len());
    };
    // Only the metric is a code span as a whole: the text of a promise may begin or end with one.
    let named = metric.trim_matches('`').split_once('.');
    let (benchmark, metric) = named.context("the metric is not BENCHMARK.METRIC")?;
    if !FIGURES.contains(&figure.as_str()) {
        bail!("the figure is not one of {}", FIGURES.join(", "));
    }
    Ok(Promise {
        text: text.clone(),
        benchmark: benchmark.to_owned(),
        metric: metric.to_owned(),
        figure: figure.clone(),
        bound: parse_bound(bound, reference)?,
    })
}

fn parse_bound(text: &str, reference: &str) -> Result<Bound> {
    let text = text.strip_prefix('≤').context("the bound does not begin with ≤")?.trim();
    let named = || match reference {
        "" | "-" => bail!("the bound needs a reference"),
        reference => Ok(reference.to_owned()),
    };
    if let Some(times) = text.strip_suffix('×') {
        return Ok(Bound::Times(number(times.trim())?, named()?));
    }
    if let Some(more) = text.strip_prefix('+') {
        return Ok(Bound::Above(quantity(more.trim())?, named()?));
    }
    if !matches!(reference, "" | "-") {
        bail!("a bound without × or + needs no reference");
    }
    Ok(Bound::Value(quantity(text)?))
}

/// A number with a unit, converted to seconds or MiB; without a unit as it is.
fn quantity(text: &str) -> Result<f64> {
    let (value, unit) = text.split_once(' ').unwrap_or((text, ""));
    let factor = match unit.trim() {
        "" | "s" | "MiB" => 1.0,
        "ms" => 1e-3,
        "MB" => 1e6 / 1_048_576.0,
        other => bail!("{other:?} is not one of s, ms, MB, MiB"),
    };
    Ok(number(value)? * factor)
}

fn number(text: &str) -> Result<f64> {
    text.parse().with_context(|| format!("{text:?} is not a number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specification(row: &str) -> String {
        format!(
            "# Specification\n\n## Speed and cost\n\nWords.\n\n| Promise | Metric | Figure | Bound | Reference |\n\
             |---|---|---|---|---|\n{row}\n\n## Developer tools\n\n| Promise | Held by |\n|---|---|\n| x | `y` |\n"
        )
    }

    fn bound(bound: &str, reference: &str) -> Result<Bound> {
        let row = format!("| deletion | `cluster.delete_to_gone` | p50 | {bound} | {reference} |");
        Ok(parse(&specification(&row))?.remove(0).bound)
    }

    #[test]
    fn a_row_names_metric_figure_and_bound() {
        let rows = "| `kubectl delete` | `cluster.delete_to_gone` | p50 | ≤ 1.2 × | bare client |";
        let expected = Promise {
            text: "`kubectl delete`".to_owned(),
            benchmark: "cluster".to_owned(),
            metric: "delete_to_gone".to_owned(),
            figure: "p50".to_owned(),
            bound: Bound::Times(1.2, "bare client".to_owned()),
        };
        assert_eq!(parse(&specification(rows)).unwrap(), [expected]);
    }

    #[test]
    fn bounds() {
        assert_eq!(bound("≤ 60 ms", "").unwrap(), Bound::Value(0.06));
        assert_eq!(bound("≤ 0.1 s", "-").unwrap(), Bound::Value(0.1));
        assert_eq!(bound("≤ 7", "").unwrap(), Bound::Value(7.0));
        assert_eq!(bound("≤ + 0.05 s", "bare client").unwrap(), Bound::Above(0.05, "bare client".to_owned()));
        let Bound::Value(mebibytes) = bound("≤ 18 MB", "").unwrap() else { panic!("a value") };
        assert!((mebibytes - 17.166).abs() < 0.001);
        for (text, reference) in
            [("< 1 s", ""), ("≤ 1.2 ×", ""), ("≤ + 1 s", "-"), ("≤ 1 s", "kubelet"), ("≤ 1 km", ""), ("≤ x", "")]
        {
            assert!(bound(text, reference).is_err(), "{text} {reference}");
        }
    }

    #[test]
    fn malformed_tables_are_rejected() {
        assert!(parse("# nothing").is_err());
        assert!(parse("## Speed and cost\n\nWords only.\n").is_err());
        for row in ["| a | `delete` | p50 | ≤ 1 s | |", "| a | `c.d` | p75 | ≤ 1 s | |", "| a | `c.d` | p50 | ≤ 1 s |"]
        {
            assert!(parse(&specification(row)).is_err(), "{row}");
        }
    }
}
