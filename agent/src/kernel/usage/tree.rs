//! The size of a folder with its content, counted by a walk that can be interrupted and resumed.
//!
//! Containers write these trees, so what is kept of one has a bound. [`MOST_OPEN`] folders are open at a time, and none while
//! the walk is interrupted: an open one would keep the memory of a volume that is unmounted meanwhile. A folder that was closed
//! is read on from the position in its list that the kernel gave with the last entry.

use std::collections::HashSet;
use std::ffi::CStr;
use std::ffi::CString;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use nix::fcntl::AtFlags;
use nix::fcntl::OFlag;
use nix::fcntl::open;
use nix::fcntl::openat;
use nix::sys::stat::FileStat;
use nix::sys::stat::Mode;
use nix::sys::stat::SFlag;
use nix::sys::stat::fstat;
use nix::sys::stat::fstatat;
use nix::sys::stat::lstat;

use crate::kernel::listing::Listing;

/// Entries that are counted before the caller decides whether to continue: a slow disk needs half a second for them.
const BATCH: usize = 64;
/// Folders that are open at a time, each with a part of its list.
const MOST_OPEN: usize = 32;
/// Folders within each other that are entered; a path reaches a fifth of it. What lies deeper is not counted.
const MOST_LEVELS: usize = 10_000;
/// Files with several links that are remembered, in 19 MB. Beyond, each link of a file that is not remembered is counted.
const MOST_LINKED: usize = 1_000_000;

/// The size of a folder with its content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeUsage {
    /// Bytes on disk.
    pub bytes: u64,
    /// Files and folders.
    pub inodes: u64,
}

/// A walk through a folder and its content on the same file system. Symbolic links are not followed; a file with several links
/// is counted once, and what is removed meanwhile is not counted.
#[derive(Debug)]
pub struct TreeWalk {
    folder: PathBuf,
    has_begun: bool,
    usage: TreeUsage,
    device: libc::dev_t,
    /// From the top to the folder that is being read; empty before the first step and after the last.
    levels: Vec<Level>,
    /// Inodes of files with several links that were counted.
    linked: HashSet<libc::ino_t>,
}

/// A folder that is not counted to its end.
#[derive(Debug)]
struct Level {
    /// In the folder above; the top has none.
    name: CString,
    inode: libc::ino_t,
    /// Where its list goes on after the last entry.
    position: i64,
    /// `None` while it is closed.
    list: Option<Listing>,
}

impl TreeWalk {
    /// Nothing is counted yet.
    pub fn new(folder: PathBuf) -> Self {
        let (usage, levels, linked) = (TreeUsage::default(), Vec::new(), HashSet::new());
        Self { folder, has_begun: false, usage, device: 0, levels, linked }
    }

    /// What was counted so far.
    pub fn usage(&self) -> TreeUsage {
        self.usage
    }

    /// Files with several links that it keeps; a million take 19 MB.
    pub fn remembered(&self) -> usize {
        self.linked.len()
    }

    /// Counts on, and returns true if everything is counted. Blocks for as long as `go_on` returns true, which is called
    /// after every 64 entries, however they are spread over folders.
    pub fn advance(&mut self, mut go_on: impl FnMut() -> bool) -> bool {
        if !self.has_begun {
            self.begin();
        }
        let mut counted = 0;
        while !self.levels.is_empty() {
            if counted == BATCH {
                if !go_on() {
                    break;
                }
                counted = 0;
            }
            counted += usize::from(self.step());
        }
        self.levels.iter_mut().for_each(|level| level.list = None);
        self.levels.is_empty()
    }

    fn begin(&mut self) {
        self.has_begun = true;
        let Ok(top) = lstat(&self.folder) else { return };
        self.device = top.st_dev;
        self.count(&top);
        if let Ok(dir) = open(&self.folder, flags(), Mode::empty()) {
            self.levels.push(Level::new(CString::default(), top.st_ino, dir));
        }
    }

    /// Counts one entry, or leaves a folder that has no more. True for an entry.
    fn step(&mut self) -> bool {
        let Some(level) = self.levels.last_mut() else { return false };
        let Some(list) = &mut level.list else {
            self.reopen();
            return false;
        };
        let Some(entry) = next_entry(list) else {
            self.leave();
            return false;
        };
        level.position = entry.next;
        if let Some(held) = entry.held.filter(|held| held.st_dev == self.device) {
            self.count(&held);
            if let Some(name) = entry.folder {
                self.enter(name, held.st_ino);
            }
        }
        true
    }

    fn count(&mut self, held: &FileStat) {
        if self.is_counted(held) {
            return;
        }
        // A file system of a container's own, through FUSE, may report any value.
        let bytes = u64::try_from(held.st_blocks).unwrap_or(0).saturating_mul(512);
        self.usage.bytes = self.usage.bytes.saturating_add(bytes);
        self.usage.inodes += 1;
    }

    /// True for a further link of a file. A folder has one name, whatever its number of links.
    fn is_counted(&mut self, held: &FileStat) -> bool {
        if held.st_nlink < 2 || is_folder(held) {
            return false;
        }
        if self.linked.len() < MOST_LINKED {
            !self.linked.insert(held.st_ino)
        } else {
            self.linked.contains(&held.st_ino)
        }
    }

    /// Goes down. A folder that cannot be opened, as one that is removed meanwhile, is left out.
    fn enter(&mut self, name: CString, inode: libc::ino_t) {
        let depth = self.levels.len();
        let above = self.levels.last().and_then(|level| level.list.as_ref());
        let opened = above.filter(|_| depth < MOST_LEVELS).and_then(|list| open_in(list.dir(), &name).ok());
        let Some(dir) = opened else { return };
        if let Some(far) = depth.checked_sub(MOST_OPEN) {
            self.levels[far].list = None;
        }
        self.levels.push(Level::new(name, inode, dir));
    }

    /// Goes up. A folder that was closed is opened from the one in it: this takes as long at any depth.
    fn leave(&mut self) {
        let below = self.levels.pop().and_then(|level| level.list);
        let (Some(below), Some(above)) = (below, self.levels.last_mut()) else { return };
        if above.list.is_none() {
            let dir = open_in(below.dir(), c"..").ok().filter(|dir| is_same(dir, self.device, above.inode));
            above.list = dir.and_then(|dir| Listing::resumed(dir, above.position).ok());
        }
    }

    /// Opens the last folder by the names from the top. Those that are gone, or are others by now, are left.
    fn reopen(&mut self) {
        let mut opened: Option<OwnedFd> = None;
        let mut depth = 0;
        for level in &self.levels {
            let next = match &opened {
                None => open(&self.folder, flags(), Mode::empty()),
                Some(dir) => open_in(dir, &level.name),
            };
            let Some(next) = next.ok().filter(|dir| is_same(dir, self.device, level.inode)) else { break };
            opened = Some(next);
            depth += 1;
        }
        self.levels.truncate(depth);
        let (Some(level), Some(dir)) = (self.levels.last_mut(), opened) else { return };
        level.list = Listing::resumed(dir, level.position).ok();
        if level.list.is_none() {
            self.levels.pop();
        }
    }
}

impl Level {
    fn new(name: CString, inode: libc::ino_t, dir: OwnedFd) -> Self {
        Self { name, inode, position: 0, list: Some(Listing::new(dir)) }
    }
}

/// An entry of a folder.
struct Entry {
    /// Where the list goes on.
    next: i64,
    /// `None` if it is gone.
    held: Option<FileStat>,
    /// The name of a folder.
    folder: Option<CString>,
}

/// `None` at the end, and if the list cannot be read.
fn next_entry(list: &mut Listing) -> Option<Entry> {
    let found = list.next_entry().ok().flatten()?;
    let held = fstatat(found.dir, found.name, AtFlags::AT_SYMLINK_NOFOLLOW).ok();
    let folder = held.as_ref().is_some_and(is_folder).then(|| found.name.to_owned());
    Some(Entry { next: found.next, held, folder })
}

fn flags() -> OFlag {
    OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY
}

fn open_in(dir: impl AsFd, name: &CStr) -> nix::Result<OwnedFd> {
    openat(dir, name, flags(), Mode::empty())
}

fn is_folder(held: &FileStat) -> bool {
    SFlag::from_bits_truncate(held.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR
}

fn is_same(dir: &OwnedFd, device: libc::dev_t, inode: libc::ino_t) -> bool {
    fstat(dir).is_ok_and(|held| held.st_dev == device && held.st_ino == inode)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    fn all(folder: &Path) -> TreeUsage {
        let mut walk = TreeWalk::new(folder.to_owned());
        assert!(walk.advance(|| true), "not interrupted");
        walk.usage()
    }

    fn fill(folder: &Path, files: usize) {
        fs::create_dir_all(folder).unwrap();
        (0..files).for_each(|number| fs::write(folder.join(number.to_string()), "").unwrap());
    }

    #[test]
    fn a_tree() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("inner")).unwrap();
        let before = all(dir.path()).bytes;
        fs::write(dir.path().join("inner/file"), vec![7; 100_000]).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("inner/link")).unwrap();
        let TreeUsage { bytes, inodes } = all(dir.path());
        assert_eq!(inodes, 4);
        assert!(bytes - before >= 98_304, "{before} {bytes}");
        assert_eq!(all(&dir.path().join("none")).inodes, 0);
        assert_eq!(all(&dir.path().join("inner/file")).inodes, 1);
    }

    #[test]
    fn a_file_with_several_links_is_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, vec![7; 100_000]).unwrap();
        fs::create_dir(dir.path().join("inner")).unwrap();
        let before = all(dir.path());
        for link in ["link", "inner/a", "inner/b"] {
            fs::hard_link(&file, dir.path().join(link)).unwrap();
        }
        let after = all(dir.path());
        assert_eq!(after.inodes, before.inodes);
        assert!(after.bytes < before.bytes + 98_304, "{before:?} {after:?}");
    }

    #[test]
    fn sizes_that_no_file_has_add_up_to_the_largest_number() {
        let dir = tempfile::tempdir().unwrap();
        let mut held = lstat(dir.path()).unwrap();
        held.st_blocks = i64::MAX;
        let mut walk = TreeWalk::new(dir.path().to_owned());
        (0..2).for_each(|_| walk.count(&held));
        assert_eq!(walk.usage(), TreeUsage { bytes: u64::MAX, inodes: 2 });
    }

    #[test]
    fn beyond_the_bound_further_links_are_counted_each() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        fs::hard_link(dir.path().join("file"), dir.path().join("link")).unwrap();
        let mut walk = TreeWalk::new(dir.path().to_owned());
        // Inodes that no file has.
        walk.linked = (0..).map(|number| libc::ino_t::MAX - number).take(MOST_LINKED).collect();
        assert!(walk.advance(|| true));
        assert_eq!(walk.usage().inodes, 3);
    }

    #[test]
    fn a_large_folder_is_counted_in_parts() {
        let dir = tempfile::tempdir().unwrap();
        fill(dir.path(), 3 * BATCH);
        let mut walk = TreeWalk::new(dir.path().to_owned());
        for part in 1..=3 {
            assert!(!walk.advance(|| false));
            assert_eq!(walk.usage().inodes, 1 + part * BATCH as u64);
            assert!(walk.levels.iter().all(|level| level.list.is_none()), "nothing stays open");
        }
        assert!(walk.advance(|| false));
        assert_eq!(walk.usage(), all(dir.path()));
    }

    #[test]
    fn a_deep_tree_needs_few_open_folders() {
        let dir = tempfile::tempdir().unwrap();
        let depth = 3 * MOST_OPEN;
        let mut folder = dir.path().to_owned();
        for _ in 0..depth {
            fill(&folder, 2);
            folder.push("d");
        }
        fs::create_dir(&folder).unwrap();
        // The top, and two files and a folder in each folder but the last.
        let expected = 1 + 3 * depth as u64;
        assert_eq!(all(dir.path()).inodes, expected);
        let mut walk = TreeWalk::new(dir.path().to_owned());
        let mut most = 0;
        while !walk.advance(|| false) {
            most = most.max(walk.levels.len());
        }
        assert_eq!(walk.usage().inodes, expected);
        assert!(most > MOST_OPEN, "it was interrupted far below the top: {most}");
    }

    #[test]
    fn no_more_folders_are_open_than_the_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = (0..2 * MOST_OPEN).fold(dir.path().to_owned(), |path, _| path.join("d"));
        fs::create_dir_all(path).unwrap();
        let mut walk = TreeWalk::new(dir.path().to_owned());
        walk.begin();
        while !walk.levels.is_empty() {
            walk.step();
            let open = walk.levels.iter().filter(|level| level.list.is_some()).count();
            assert!(open <= MOST_OPEN, "{open}");
        }
        assert_eq!(walk.usage().inodes, 1 + 2 * MOST_OPEN as u64);
    }

    #[test]
    fn what_is_removed_between_two_parts_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("inner");
        fill(&inner, 2 * BATCH);
        let mut walk = TreeWalk::new(dir.path().to_owned());
        assert!(!walk.advance(|| false));
        fs::remove_dir_all(&inner).unwrap();
        // It may get the inode of the folder that is gone; the new one of the same name gets another.
        fs::create_dir(dir.path().join("other")).unwrap();
        fill(&inner, 1);
        assert!(walk.advance(|| true));
        let inodes = walk.usage().inodes;
        assert!((1 + BATCH as u64..=4 + BATCH as u64).contains(&inodes), "{inodes}");
        let mut walk = TreeWalk::new(inner.clone());
        fill(&inner, 2 * BATCH);
        assert!(!walk.advance(|| false));
        fs::remove_dir_all(&inner).unwrap();
        assert!(walk.advance(|| true), "the whole folder is gone");
    }
}
