//! Reads files of cgroups with few system calls: a scrape of a full node reads thousands of them.

use std::cell::Cell;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::NixPath;
use nix::fcntl::OFlag;
use nix::fcntl::open;
use nix::fcntl::openat;
use nix::sys::stat::Mode;

use crate::cgroups::arithmetic;

/// cgroup v1 reports "no limit" as a number close to the largest page-aligned one.
const NO_LIMIT: u64 = 1 << 62;
/// What one read of a kernel file returns at most, unless one of its records is longer.
const PAGE: usize = 4096;
/// Longest file that is read: `cgroup.procs` has a line for each process.
const LIMIT: usize = 1 << 20;
/// Longer than any number.
const NUMBER: usize = 32;

/// The folder of a cgroup. Its files are opened relative to it: looking up the path to a cgroup takes longer than reading a
/// number in it.
#[derive(Debug)]
pub(super) struct Folder(OwnedFd);

impl Folder {
    /// `None` if it was removed.
    pub(super) fn open(path: &Path) -> Option<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        open(path, flags, Mode::empty()).ok().map(Self)
    }

    /// The text of a file, its first MiB at most; `None` if the file is not readable or no UTF-8.
    pub(super) fn text(&self, name: &(impl NixPath + ?Sized)) -> Option<String> {
        let mut file = self.file(name)?;
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
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        let mut text = [0; NUMBER];
        let length = self.file(name)?.read(&mut text).ok()?;
        std::str::from_utf8(text.get(..length)?).ok()?.trim().parse().ok()
    }

    /// The only number of a file, unless it stands for "no limit".
    pub(super) fn limit(&self, name: &str) -> Option<u64> {
        self.number(name).filter(|limit| *limit < NO_LIMIT)
    }

    /// A file with lines of `name number`; empty if it is not readable.
    pub(super) fn table(&self, name: &(impl NixPath + ?Sized)) -> Table {
        Table { text: self.text(name).unwrap_or_default(), next: Cell::new(0) }
    }

    fn file(&self, name: &(impl NixPath + ?Sized)) -> Option<File> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        openat(&self.0, name, flags, Mode::empty()).ok().map(File::from)
    }
}

/// A file with lines of `name number`, each name once.
pub(super) struct Table {
    text: String,
    /// Where the line after the one that was found last begins. The next search begins there: all numbers that are read in
    /// the order of the file are found in one pass.
    next: Cell<usize>,
}

impl Table {
    /// The number of a line.
    pub(super) fn get(&self, name: &str) -> Option<u64> {
        let next = self.next.get();
        self.find(name, next, self.text.len()).or_else(|| self.find(name, 0, next))
    }

    /// The number of a line between two beginnings of lines.
    fn find(&self, name: &str, from: usize, to: usize) -> Option<u64> {
        let of_line = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
        let mut end = from;
        for line in self.text.get(from..to)?.split_inclusive('\n') {
            end += line.len();
            let number = of_line(line);
            if number.is_some() {
                self.next.set(end);
                return number;
            }
        }
        None
    }

    /// OOM kills, in a file that counts them.
    pub(super) fn oom_kills(&self) -> Option<u64> {
        Some(arithmetic::oom_kills(self.get("oom_kill")?, self.get("oom_group_kill").unwrap_or(0)))
    }

    /// The sum over all lines whose name starts so.
    pub(super) fn sum_of(&self, prefix: &str) -> u64 {
        let of_line = |line: &str| line.starts_with(prefix).then(|| line.rsplit_once(' ')?.1.trim().parse().ok())?;
        self.text.lines().filter_map(of_line).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_to_their_end() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::open(dir.path()).unwrap();
        for length in [0, 1, 2047, 2048, 4095, 4096, 4097, 100_000] {
            std::fs::write(dir.path().join("file"), "x".repeat(length)).unwrap();
            assert_eq!(folder.text("file").map(|text| text.len()), Some(length));
        }
        let devices = Folder::open(Path::new("/dev")).unwrap();
        assert!(devices.text("zero").is_some_and(|text| text.len() == LIMIT), "bounded");
        assert_eq!(folder.text("none"), None);
        assert!(Folder::open(&dir.path().join("none")).is_none() && Folder::open(&dir.path().join("file")).is_none());
    }

    #[test]
    fn tables_and_limits() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::open(dir.path()).unwrap();
        let put = |text: &str| std::fs::write(dir.path().join("file"), text).unwrap();
        put("file 10\nfile_mapped 4\nbroken\nworse x\n");
        let found = folder.table("file");
        assert_eq!((found.get("file"), found.get("file_mapped")), (Some(10), Some(4)));
        assert_eq!((found.get("broken"), found.get("worse"), found.get("fil")), (None, None, None));
        assert_eq!((found.get("file_mapped"), found.get("file"), found.get("file")), (Some(4), Some(10), Some(10)));
        assert_eq!(found.sum_of("file"), 14, "whatever was found last");
        assert_eq!(folder.table("none").get("file"), None);
        put("first 1\nlast 2");
        let found = folder.table("file");
        assert_eq!((found.get("last"), found.get("last"), found.get("first")), (Some(2), Some(2), Some(1)));
        put("9223372036854771712\n");
        assert_eq!((folder.number("file"), folder.limit("file")), (Some(9_223_372_036_854_771_712), None));
        put("max\n");
        assert_eq!(folder.limit("file"), None);
        put(&"9".repeat(NUMBER));
        assert_eq!(folder.number("file"), None);
    }
}
