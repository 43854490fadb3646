//! Stamp files, which containers write with timestamps of the monotonic clock.

use std::fs;
use std::path::Path;

/// One line of a stamp file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stamp {
    /// `start` or `exit`.
    pub word: String,
    /// Nanoseconds of the monotonic clock.
    pub at: u64,
}

/// All complete lines of a stamp file; none if the file does not exist yet.
pub(super) fn read(folder: &Path, name: &str) -> Vec<Stamp> {
    parse(&fs::read_to_string(folder.join(name)).unwrap_or_default())
}

/// The time between two moments, in milliseconds.
pub(super) fn milliseconds(from: u64, to: u64) -> f64 {
    // Exact in a double for the duration of a demo.
    to.saturating_sub(from) as f64 / 1e6
}

fn parse(text: &str) -> Vec<Stamp> {
    text.lines()
        .filter_map(|line| {
            let (word, at) = line.split_once(' ')?;
            Some(Stamp { word: word.to_owned(), at: at.parse().ok()? })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_are_read_line_by_line() {
        let stamp = |word: &str, at| Stamp { word: word.to_owned(), at };
        assert_eq!(parse("start 12\nexit 2500012\nstart"), [stamp("start", 12), stamp("exit", 2_500_012)]);
        assert!((milliseconds(12, 2_500_012) - 2.5).abs() < f64::EPSILON);
    }
}
