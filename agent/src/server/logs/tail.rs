//! Finds where the last lines of a file begin, reading it from its end.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// Bytes per read.
const BLOCK: u64 = 32 * 1024;

/// Offset at which the last `lines` newline-terminated lines of the file begin; what follows the last newline does not
/// count as a line. Memory is one block, however long the file. Blocks.
///
/// # Errors
/// The file cannot be read.
pub(super) fn start(file: &File, lines: u64) -> io::Result<u64> {
    let mut end = file.metadata()?.len();
    let mut found = 0;
    let mut block = vec![0; usize::try_from(BLOCK.min(end)).unwrap_or_default()];
    while end > 0 {
        let begin = end.saturating_sub(BLOCK);
        let part = &mut block[..usize::try_from(end - begin).unwrap_or_default()];
        file.read_exact_at(part, begin)?;
        for (at, _) in part.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n') {
            found += 1;
            // The newline before the first wanted line.
            if found > lines {
                return Ok(begin + at as u64 + 1);
            }
        }
        end = begin;
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;

    use super::*;

    /// By looking at the whole text.
    fn naive(text: &[u8], lines: usize) -> u64 {
        let newlines: Vec<usize> = (0..text.len()).filter(|at| text[*at] == b'\n').collect();
        if newlines.len() <= lines { 0 } else { newlines[newlines.len() - lines - 1] as u64 + 1 }
    }

    fn file(text: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text).unwrap();
        file
    }

    #[test]
    fn table() {
        for (text, lines, expected) in [
            ("", 3, 0),
            ("a\nb\nc\n", 2, 2),
            ("a\nb\nc\n", 3, 0),
            ("a\nb\nc\n", 9, 0),
            ("a\nb\nc\n", 0, 6),
            ("a\nb\npart", 1, 2),
            ("a\nb\npart", 0, 4),
            ("no newline", 1, 0),
        ] {
            assert_eq!(start(&file(text.as_bytes()), lines).unwrap(), expected, "{text:?} {lines}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn blocks_make_no_difference(
            lengths in proptest::collection::vec(0..9_000_usize, 0..30), lines in 0..40_usize, terminated: bool,
        ) {
            let mut text = lengths.iter().flat_map(|n| [vec![b'x'; *n], vec![b'\n']].concat()).collect::<Vec<u8>>();
            if !terminated {
                text.pop();
            }
            prop_assert_eq!(start(&file(&text), lines as u64).unwrap(), naive(&text, lines));
        }
    }
}
