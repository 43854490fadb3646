//! Tables for the terminal.

use std::fmt::Write as _;

use super::Metric;
use super::Report;
use super::targets;

/// Everything, as text.
pub(super) fn render(report: &Report) -> String {
    let mut text = format!("\n{}; {} rounds\n", report.environment.line(), report.rounds);
    for metric in report.metrics() {
        let rows = rows(report, metric);
        text.push_str(&format!("\n{}\n", report.title(metric)));
        text.push_str(&aligned(&rows));
    }
    text.push_str(&verdicts(report));
    for failure in &report.results.failures {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "went wrong: {failure}");
    }
    text
}

/// Heading and a row per column; first cells are names, the others figures and how many times a reference they are.
pub(super) fn rows(report: &Report, metric: Metric) -> Vec<Vec<String>> {
    let figures: &[&str] = if metric.is_single() { &["value"] } else { &["p50", "p90", "p99", "max", "n"] };
    let references = report.references.iter().map(|reference| format!("× {reference}"));
    let names = std::iter::once("").chain(figures.iter().copied()).map(str::to_owned);
    let mut rows = vec![names.chain(references).collect::<Vec<_>>()];
    for column in &report.columns {
        let Some(summary) = report.results.summary(metric, column) else { continue };
        let mut row = vec![column.clone(), metric.show(summary.p50)];
        if !metric.is_single() {
            row.extend([summary.p90, summary.p99, summary.max].map(|value| metric.show(value)));
            row.push(summary.count.to_string());
        }
        let times =
            |floor: &String| report.ratio(metric, column, floor).map_or_else(String::new, |r| format!("{r:.2}"));
        row.extend(report.references.iter().map(times));
        rows.push(row);
    }
    rows
}

fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |index: usize| rows.iter().filter_map(|row| row.get(index)).map(|cell| cell.chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|index| width(index).unwrap_or_default()).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (index, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let cell = if index == 0 { format!("  {cell:<width$}") } else { format!("  {cell:>width$}") };
            line.push_str(&cell);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn verdicts(report: &Report) -> String {
    let verdicts = targets::judge(&report.results);
    if verdicts.is_empty() {
        return String::new();
    }
    let mut text = "\ntargets\n".to_owned();
    for verdict in verdicts {
        let sign = if verdict.is_kept() { "met   " } else { "MISSED" };
        let share = verdict.measured / verdict.limit * 100.0;
        let _ = writeln!(text, "  {sign}  {} ({share:.0} % of the limit)", verdict.promise);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::tests::report;
    use super::*;

    #[test]
    fn the_table_shows_figures_ratios_targets_and_failures() {
        let text = render(&report());
        assert!(text.contains("20 pods crash once"), "{text}");
        let row = text.lines().find(|line| line.trim_start().starts_with("evented")).unwrap();
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>(),
            ["evented", "72.0", "ms", "300.0", "ms", "300.0", "ms", "300.0", "ms", "3", "1.06", "0.65"],
            "{text}"
        );
        assert!(text.contains("met     Restart p50 of evented ≤ 1.1 × kernel floor"), "{text}");
        assert!(text.contains("MISSED  Restart max of evented ≤ 1.5 × kernel floor"), "{text}");
        assert!(text.contains("went wrong: evented: crash: <pod> ran twice"), "{text}");
        assert!(!text.contains("10 pods at once"), "not measured: {text}");
    }

    #[test]
    fn cells_stand_in_columns() {
        let rows = [vec!["".to_owned(), "p50".to_owned()], vec!["long name".to_owned(), "9".to_owned()]];
        assert_eq!(aligned(&rows), "             p50\n  long name    9\n");
    }
}
