//! The merged figures as Markdown, for the terminal and for documents.

use std::fmt::Write as _;

use super::merged::Merged;
use super::merged::MergedMetric;
use super::merged::Spread;
use crate::metric::Unit;

/// A table per metric, and the failures.
pub(super) fn render(merged: &Merged) -> String {
    let mut text = format!("# keblet bench {}\n\n", merged.benchmark);
    let _ = writeln!(text, "Commit {}; {}.", merged.commits.join(", "), merged.environment.line());
    text.push_str("Medians over the runs, with the least and the greatest value of a run in brackets.\n");
    let mut title = "";
    for metric in &merged.measured {
        if metric.title != title {
            title = &metric.title;
            let rows = rows(merged, title);
            let _ = write!(text, "\n## {title}\n\n{}", aligned(&rows));
        }
    }
    for failure in &merged.failures {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\nFAILED: {failure}");
    }
    text
}

/// Heading and a row per participant.
fn rows(merged: &Merged, title: &str) -> Vec<Vec<String>> {
    let metrics: Vec<_> = merged.measured.iter().filter(|metric| metric.title == title).collect();
    let single = metrics.iter().any(|metric| metric.unit != Unit::Seconds);
    let figures: &[&str] = if single { &["value"] } else { &["p50", "p99", "max"] };
    let names = ["participant"].into_iter().chain(figures.iter().copied()).map(str::to_owned);
    let references = merged.references.iter().map(|reference| format!("× {reference}"));
    let mut rows = vec![names.chain(references).chain(["runs".to_owned()]).collect::<Vec<_>>()];
    for metric in metrics {
        let mut row = vec![metric.participant.clone(), cell(metric, metric.p50)];
        if !single {
            row.extend([cell(metric, metric.p99), cell(metric, metric.max)]);
        }
        let ratio =
            |reference: &String| merged.ratio(metric, reference).map_or_else(String::new, |r| format!("{r:.2}"));
        row.extend(merged.references.iter().map(ratio));
        row.push(metric.runs.to_string());
        rows.push(row);
    }
    rows
}

fn cell(metric: &MergedMetric, spread: Option<Spread>) -> String {
    let show = |value| metric.unit.show(value);
    match spread {
        None => "beyond".to_owned(),
        Some(spread) if metric.runs == 1 => show(spread.median),
        Some(Spread { median, min, max }) => format!("{} ({} – {})", show(median), show(min), show(max)),
    }
}

fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or_default().max(3)).collect();
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).enumerate();
        let padded = cells.map(
            |(column, (cell, width))| {
                if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
            },
        );
        text.push_str(&line(padded.collect()));
        if index == 0 {
            let rule = |(column, width): (usize, &usize)| {
                let dashes = "-".repeat(width - 1);
                if column == 0 { format!("{dashes}-") } else { format!("{dashes}:") }
            };
            text.push_str(&line(widths.iter().enumerate().map(rule).collect()));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::run::RunDocument;
    use super::super::tests::results;
    use super::super::tests::setup;
    use super::*;

    #[test]
    fn the_table_shows_medians_spread_and_ratios() {
        let run = |restart| RunDocument::new(&setup(Path::new("")), &results(restart));
        let merged = Merged::of(&[run([0.07, 0.072, 0.3]), run([0.07, 0.074, 0.2])]).unwrap();
        let text = render(&merged);
        assert!(text.contains("Commit abc;"), "{text}");
        assert!(text.contains("## 20 pods crash once"), "{text}");
        let row = text.lines().find(|line| line.starts_with("| keblet")).unwrap();
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        assert_eq!(cells[1..3], ["keblet", "73.0 ms (72.0 ms – 74.0 ms)"], "{text}");
        assert_eq!(cells[5..7], ["1.07", "2"], "{text}");
        assert!(!text.contains("10 pods at once"), "not measured: {text}");
    }

    #[test]
    fn cells_are_aligned() {
        let rows = [vec!["".to_owned(), "p50".to_owned()], vec!["long name".to_owned(), "9".to_owned()]];
        assert_eq!(aligned(&rows), "|           | p50 |\n| --------- | --: |\n| long name |   9 |\n");
    }
}
