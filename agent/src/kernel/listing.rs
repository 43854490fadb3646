//! The list of a folder entry by entry, with the position after each, which readdir(3) hides. The kernel reads the list on
//! from there, also for a folder that was closed meanwhile: of a list of any length only a part is in memory.

use std::ffi::CStr;
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::unistd::Whence;
use nix::unistd::lseek64;

/// Bytes of a list that are read at once.
const PART: usize = 32 << 10;

/// An open folder, and what is read of its list.
#[derive(Debug)]
pub struct Listing {
    dir: OwnedFd,
    /// As the kernel wrote it, up to `end`.
    read: Vec<u8>,
    /// Where the next entry begins in it.
    at: usize,
    end: usize,
}

/// An entry of a folder.
#[derive(Clone, Copy, Debug)]
pub struct ListEntry<'a> {
    /// The folder.
    pub dir: &'a OwnedFd,
    /// The name in it.
    pub name: &'a CStr,
    /// Where the list goes on.
    pub next: i64,
}

impl Listing {
    /// The list of a folder that was opened for this: position and descriptor belong together.
    pub fn new(dir: OwnedFd) -> Self {
        Self { dir, read: Vec::new(), at: 0, end: 0 }
    }

    /// The list from a position on.
    ///
    /// # Errors
    /// There is no such position.
    pub fn resumed(dir: OwnedFd, position: i64) -> nix::Result<Self> {
        lseek64(&dir, position, Whence::SeekSet)?;
        Ok(Self::new(dir))
    }

    /// The folder.
    pub fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// The next entry, without the two that every folder has; `None` at the end.
    ///
    /// # Errors
    /// The list cannot be read on.
    pub fn next_entry(&mut self) -> nix::Result<Option<ListEntry<'_>>> {
        let begin = loop {
            if self.at == self.end && !self.read_on()? {
                return Ok(None);
            }
            let begin = self.at;
            let Some(record) = Record::first_of(&self.read[begin..self.end]) else { return Ok(None) };
            self.at += record.length;
            if record.name != c"." && record.name != c".." {
                break begin;
            }
        };
        let dir = &self.dir;
        let record = Record::first_of(&self.read[begin..self.end]);
        Ok(record.map(|record| ListEntry { dir, name: record.name, next: record.next }))
    }

    /// False if there is nothing more.
    fn read_on(&mut self) -> nix::Result<bool> {
        (self.at, self.end) = (0, 0);
        self.read.resize(PART, 0);
        let (dir, buffer, length) = (self.dir.as_raw_fd(), self.read.as_mut_ptr(), self.read.len());
        // SAFETY: libc has no function for this call. The descriptor is open, and the kernel writes at most `length` bytes,
        // which the buffer has.
        let written = Errno::result(unsafe { libc::syscall(libc::SYS_getdents64, dir, buffer, length) });
        self.end = written.map_or(0, |written| usize::try_from(written).unwrap_or(0)).min(PART);
        match written {
            // The folder is removed, as readdir(3) has it too.
            Err(Errno::ENOENT) => Ok(false),
            written => Ok(written? > 0),
        }
    }
}

/// The kernel's `struct linux_dirent64`.
struct Record<'a> {
    length: usize,
    /// The position after this entry.
    next: i64,
    name: &'a CStr,
}

impl<'a> Record<'a> {
    fn first_of(bytes: &'a [u8]) -> Option<Self> {
        let next = i64::from_ne_bytes(*bytes.get(8..)?.first_chunk::<8>()?);
        let length = usize::from(u16::from_ne_bytes(*bytes.get(16..)?.first_chunk::<2>()?));
        let name = CStr::from_bytes_until_nul(bytes.get(19..length)?).ok()?;
        Some(Self { length, next, name })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    fn open(path: &Path) -> OwnedFd {
        fs::File::open(path).expect("a folder").into()
    }

    /// The names and the position after the last of them, at most so many.
    fn read(list: &mut Listing, most: usize) -> (Vec<String>, i64) {
        let (mut names, mut position) = (Vec::new(), 0);
        while names.len() < most
            && let Some(entry) = list.next_entry().expect("readable")
        {
            names.push(entry.name.to_str().expect("text").to_owned());
            position = entry.next;
        }
        (names, position)
    }

    #[test]
    fn a_list_of_several_parts_is_resumed_after_any_entry() {
        let dir = tempfile::tempdir().expect("a folder");
        // A record is of 24 bytes or more.
        let all: BTreeSet<String> = (0..2 * PART / 24).map(|number| number.to_string()).collect();
        all.iter().for_each(|name| fs::write(dir.path().join(name), "").expect("a file"));
        let names = read(&mut Listing::new(open(dir.path())), usize::MAX).0;
        assert_eq!((names.len(), names.iter().cloned().collect::<BTreeSet<_>>()), (all.len(), all));
        for first in [1, 2, PART / 24, names.len() - 1] {
            let (mut begin, position) = read(&mut Listing::new(open(dir.path())), first);
            let mut list = Listing::resumed(open(dir.path()), position).expect("the position");
            begin.extend(read(&mut list, usize::MAX).0);
            assert!(begin == names, "{first}");
        }
    }

    #[test]
    fn a_folder_that_is_removed_has_no_entries_and_a_file_no_list() {
        let dir = tempfile::tempdir().expect("a folder");
        let (folder, file) = (dir.path().join("folder"), dir.path().join("file"));
        fs::create_dir(&folder).expect("a folder");
        let mut list = Listing::new(open(&folder));
        fs::remove_dir(&folder).expect("removed");
        assert!(list.next_entry().expect("the end").is_none());
        fs::write(&file, "").expect("a file");
        assert_eq!(Listing::new(open(&file)).next_entry().expect_err("no folder"), Errno::ENOTDIR);
    }
}
