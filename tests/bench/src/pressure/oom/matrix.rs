//! A confusion matrix: how often each truth was reported as what. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::judge::is_right;

/// Counts by truth and report.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Matrix(BTreeMap<String, BTreeMap<String, u64>>);

impl Matrix {
    pub(crate) fn count(&mut self, (truth, reported): (String, String)) {
        *self.0.entry(truth).or_default().entry(reported).or_default() += 1;
    }

    /// All counts, and those that are wrong.
    pub(crate) fn totals(&self) -> (u64, u64) {
        let cells =
            self.0.iter().flat_map(|(row, cells)| cells.iter().map(move |(column, count)| (row, column, count)));
        cells.fold((0, 0), |(all, wrong), (row, column, count)| {
            (all + count, wrong + if is_right(row, column) { 0 } else { *count })
        })
    }

    /// Share of wrong reports in percent; `None` without any.
    pub(crate) fn wrong_percent(&self) -> Option<f64> {
        let (all, wrong) = self.totals();
        (all > 0).then(|| 100.0 * wrong as f64 / all as f64)
    }

    /// A line per truth, with its reports; wrong ones are marked.
    pub(crate) fn render(&self, title: &str) -> String {
        let (all, wrong) = self.totals();
        let mut text = format!("{title}: {wrong} of {all} wrong\n");
        let width = self.0.keys().map(String::len).max().unwrap_or_default();
        for (row, cells) in &self.0 {
            let cells = cells.iter().map(|(column, count)| {
                let mark = if is_right(row, column) { "" } else { " WRONG" };
                format!("{count} {column}{mark}")
            });
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {row:<width$}  {}", cells.collect::<Vec<_>>().join(", "));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_reports_are_counted_and_marked() {
        let mut matrix = Matrix::default();
        let cell = |truth: &str, reported: &str| (truth.to_owned(), reported.to_owned());
        for _ in 0..3 {
            matrix.count(cell("child / pod", "child / pod"));
        }
        matrix.count(cell("child / pod", "main / pod"));
        assert_eq!(matrix.totals(), (4, 1));
        assert_eq!(matrix.wrong_percent(), Some(25.0));
        assert_eq!(
            matrix.render("verdicts"),
            "verdicts: 1 of 4 wrong\n  child / pod  3 child / pod, 1 main / pod WRONG\n"
        );
        assert_eq!(Matrix::default().wrong_percent(), None);
    }
}
