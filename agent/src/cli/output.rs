//! What commands print: text for people, JSON for programs.

use std::io;
use std::io::Write;
use std::iter;

use serde::Serialize;

/// How an answer is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// Writes an answer as JSON, indented.
///
/// # Errors
/// The output cannot be written.
pub fn json(out: &mut dyn Write, answer: &impl Serialize) -> anyhow::Result<()> {
    serde_json::to_writer_pretty(&mut *out, answer)?;
    writeln!(out)?;
    Ok(())
}

/// Writes rows in columns as wide as their widest cell; the last column has no fixed width.
///
/// # Errors
/// The output cannot be written.
pub fn table<const N: usize>(out: &mut dyn Write, rows: &[[String; N]]) -> io::Result<()> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            // A width in a format string is no more than 65,535.
            line.extend(iter::repeat_n(' ', width - cell.chars().count() + 2));
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let long = "ä".repeat(70_000);
        let rows = [["a".to_owned(), "b".to_owned()], [long.clone(), "c".to_owned()]];
        let mut out = Vec::new();
        table(&mut out, &rows).expect("written");
        let expected = format!("a{}  b\n{long}  c\n", " ".repeat(69_999));
        assert!(String::from_utf8(out).expect("text") == expected);
    }
}
