//! Reads files of cgroups with few system calls: a scrape of a full node reads thousands of them.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// cgroup v1 reports "no limit" as a number close to the largest page-aligned one.
const NO_LIMIT: u64 = 1 << 62;
/// What one read of a kernel file returns at most, unless one of its records is longer.
const PAGE: usize = 4096;
/// Longest file that is read: `cgroup.procs` has a line for each process.
const LIMIT: usize = 1 << 20;

/// The text of a file, its first MiB at most; `None` if the file is not readable or no UTF-8.
pub(super) fn text(file: &Path) -> Option<String> {
    let mut file = File::open(file).ok()?;
    let (mut bytes, mut page) = (Vec::new(), [0; PAGE]);
    loop {
        let length = file.read(&mut page).ok()?;
        bytes.extend_from_slice(page.get(..length)?);
        // The kernel fills a page as far as whole records fit: much less than a page is the end.
        if length < PAGE / 2 || bytes.len() >= LIMIT {
            return String::from_utf8(bytes).ok();
        }
    }
}

/// The only number of a file.
pub(super) fn number(file: &Path) -> Option<u64> {
    text(file)?.trim().parse().ok()
}

/// The only number of a file, unless it stands for "no limit".
pub(super) fn limit(file: &Path) -> Option<u64> {
    number(file).filter(|limit| *limit < NO_LIMIT)
}

/// A file with lines of `name number`.
pub(super) struct Table(String);

/// Reads a table; empty if the file is not readable.
pub(super) fn table(file: &Path) -> Table {
    Table(text(file).unwrap_or_default())
}

impl Table {
    /// The number of a line.
    pub(super) fn get(&self, name: &str) -> Option<u64> {
        let of_line = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
        self.0.lines().find_map(of_line)
    }

    /// The sum over all lines whose name starts so.
    pub(super) fn sum_of(&self, prefix: &str) -> u64 {
        let of_line = |line: &str| line.starts_with(prefix).then(|| line.rsplit_once(' ')?.1.trim().parse().ok())?;
        self.0.lines().filter_map(of_line).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_to_their_end() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        for length in [0, 1, 2047, 2048, 4095, 4096, 4097, 100_000] {
            std::fs::write(&file, "x".repeat(length)).unwrap();
            assert_eq!(text(&file).map(|text| text.len()), Some(length));
        }
        assert!(text(Path::new("/dev/zero")).is_some_and(|text| text.len() == LIMIT), "bounded");
        assert_eq!(text(&dir.path().join("none")), None);
    }

    #[test]
    fn tables_and_limits() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "file 10\nfile_mapped 4\nbroken\nworse x\n").unwrap();
        let found = table(&file);
        assert_eq!((found.get("file"), found.get("file_mapped")), (Some(10), Some(4)));
        assert_eq!((found.get("broken"), found.get("worse"), found.get("fil")), (None, None, None));
        assert_eq!(table(Path::new("/no/such/file")).get("file"), None);
        std::fs::write(&file, "9223372036854771712\n").unwrap();
        assert_eq!((number(&file), limit(&file)), (Some(9_223_372_036_854_771_712), None));
        std::fs::write(&file, "max\n").unwrap();
        assert_eq!(limit(&file), None);
    }
}
