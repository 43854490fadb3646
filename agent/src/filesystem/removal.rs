//! Removes trees that containers have written: by descriptors, without following links or crossing mount points, and
//! with a bound on depth, so that no tree exhausts stack or descriptors.

use std::ffi::CStr;
use std::ffi::CString;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::BorrowedFd;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::dir::Dir;
use nix::dir::Type;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::fcntl::open;
use nix::fcntl::renameat;
use nix::sys::stat::Mode;
use nix::unistd::UnlinkatFlags;
use nix::unistd::unlinkat;

use super::openat2;

/// Directories deeper than this are moved up to the top first.
const MAX_DEPTH: u32 = 64;
/// Entries removed before a directory is read again.
const BATCH: usize = 1024;

/// Name and type of a directory's entry; the type is unknown on some file systems.
pub type DirEntry = (CString, Option<Type>);

/// Removes a directory with all its content, by its path. A directory that does not exist counts as removed. Blocking.
///
/// # Errors
/// As [`remove_entry`].
pub fn remove_tree(path: &Path) -> io::Result<()> {
    let Some((parent, name)) = path.parent().zip(path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "has no parent directory"));
    };
    // Directories above the tree are the operator's: links in them are followed.
    match open(parent, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()) {
        Err(Errno::ENOENT) => Ok(()),
        parent => remove_entry(parent?, &CString::new(name.as_bytes())?, None),
    }
}

/// Removes a file, or a directory with all its content, from `dir`. An entry that does not exist counts as removed; what
/// lies behind a mount point, at any level, is neither read nor removed. Blocking.
///
/// # Errors
/// [`io::ErrorKind::CrossesDevices`] for a mount point, which stays with the directories above it; anything the kernel
/// refuses to remove.
pub fn remove_entry(dir: impl AsFd, name: &CStr, kind: Option<Type>) -> io::Result<()> {
    let dir = dir.as_fd();
    if unlink_file(dir, name, kind)? {
        return Ok(());
    }
    let tree = match openat2::open_dir(dir, name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        result => result?,
    };
    let removal = Removal { root: tree.as_fd() };
    // Each round also meets the directories that the round before moved up.
    while removal.clear(tree.as_fd(), 0)? {}
    remove_dir(dir, name)
}

/// Removes from `dir` a directory that contains nothing but directories. One that does not exist counts as removed; what
/// lies behind a mount point, at any level, is neither read nor removed. Blocking.
///
/// # Errors
/// [`io::ErrorKind::DirectoryNotEmpty`] if it contains anything else, or directories are nested too deeply;
/// [`io::ErrorKind::CrossesDevices`] for a mount point; anything the kernel refuses to remove.
pub fn remove_directories(dir: impl AsFd, name: &CStr) -> io::Result<()> {
    remove_level(dir.as_fd(), name, 0)
}

fn remove_level(dir: BorrowedFd<'_>, name: &CStr, depth: u32) -> io::Result<()> {
    match remove_dir(dir, name) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && depth < MAX_DEPTH => {}
        done => return done,
    }
    let level = match openat2::open_dir(dir, name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        level => level?,
    };
    loop {
        let batch = list(level.as_fd(), BATCH)?;
        if batch.is_empty() {
            return remove_dir(dir, name);
        }
        for (below, _) in batch {
            match remove_level(level.as_fd(), &below, depth + 1) {
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                    return Err(io::ErrorKind::DirectoryNotEmpty.into());
                }
                done => done?,
            }
        }
    }
}

/// All names in a directory, without the two that every directory has.
///
/// # Errors
/// The directory cannot be read.
pub fn entries(dir: impl AsFd) -> io::Result<Vec<DirEntry>> {
    list(dir.as_fd(), usize::MAX)
}

struct Removal<'a> {
    root: BorrowedFd<'a>,
}

impl Removal<'_> {
    /// Removes the content of `dir`; true if a directory was moved to the root on the way.
    fn clear(&self, dir: BorrowedFd<'_>, depth: u32) -> io::Result<bool> {
        let mut moved = false;
        loop {
            let batch = list(dir, BATCH)?;
            if batch.is_empty() {
                return Ok(moved);
            }
            for (name, kind) in batch {
                moved |= self.remove(dir, &name, kind, depth)?;
            }
            // Moved directories are in the root now: at depth 0 each further listing would find them again.
            if moved && depth == 0 {
                return Ok(true);
            }
        }
    }

    fn remove(&self, dir: BorrowedFd<'_>, name: &CStr, kind: Option<Type>, depth: u32) -> io::Result<bool> {
        if unlink_file(dir, name, kind)? {
            return Ok(false);
        }
        if depth >= MAX_DEPTH {
            // Random: the process that has written the tree must not predict it, and interrupted removals have left others.
            let up = CString::new(format!(".keblet-removal-{:016x}", fastrand::u64(..)))?;
            return match renameat(dir, name, self.root, up.as_c_str()) {
                Err(Errno::EBUSY) => Err(openat2::mount_point(name)),
                result => Ok(result.map(|()| true)?),
            };
        }
        let below: OwnedFd = openat2::open_dir(dir, name)?;
        let moved = self.clear(below.as_fd(), depth + 1)?;
        drop(below);
        remove_dir(dir, name)?;
        Ok(moved)
    }
}

/// Removes anything but a directory; false if `name` is one.
fn unlink_file(dir: BorrowedFd<'_>, name: &CStr, kind: Option<Type>) -> io::Result<bool> {
    if kind == Some(Type::Directory) {
        return Ok(false);
    }
    match unlinkat(dir, name, UnlinkatFlags::NoRemoveDir) {
        Err(Errno::EISDIR | Errno::EPERM) if kind.is_none() => Ok(false),
        Err(Errno::EBUSY) => Err(openat2::mount_point(name)),
        Ok(()) | Err(Errno::ENOENT) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

fn remove_dir(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    match unlinkat(dir, name, UnlinkatFlags::RemoveDir) {
        // Mounted on after it was emptied: what was removed lay under the mount.
        Err(Errno::EBUSY) => Err(openat2::mount_point(name)),
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn list(dir: BorrowedFd<'_>, limit: usize) -> io::Result<Vec<DirEntry>> {
    // A descriptor of its own: the position in the listing belongs to the descriptor.
    let own = openat2::open_dir(dir, c".")?;
    let mut listing = Dir::from_fd(own)?;
    let mut found = Vec::new();
    for entry in listing.iter() {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            found.push((name.to_owned(), entry.file_type()));
        }
        if found.len() == limit {
            break;
        }
    }
    Ok(found)
}
