//! Deleting trees that containers have written: by file descriptors, without following links, without crossing mount
//! points, and with a bound on depth, so that no tree can exhaust stack or descriptors.

use std::ffi::CStr;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::BorrowedFd;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::dir::Dir;
use nix::dir::Type;
use nix::errno::Errno;
use nix::fcntl::renameat;
use nix::unistd::UnlinkatFlags;
use nix::unistd::unlinkat;

use super::VolumeError;
use super::error::OnPath as _;
use super::openat2;

/// Directories deeper than this are moved up to the top first.
const MAX_DEPTH: u32 = 64;
/// Entries looked at before a directory is read again.
const BATCH: usize = 1024;

/// Deletes a directory and all in it. One that is not there is fine.
///
/// # Errors
/// A mount point inside; something the kernel keeps.
pub(super) fn remove_tree(dir: &Path) -> Result<(), VolumeError> {
    if !is_there(dir) {
        return Ok(());
    }
    remove_contents(dir)?;
    fs::remove_dir(dir).on("remove", dir)
}

/// Deletes all in a directory. One that is not there is fine.
///
/// # Errors
/// As [`remove_tree`].
pub(super) fn remove_contents(dir: &Path) -> Result<(), VolumeError> {
    if !is_there(dir) {
        return Ok(());
    }
    let root = openat2::open_root(dir).on("open", dir)?;
    let mut sweep = Sweep { root: root.as_fd(), moved: 0 };
    // Each round also meets what the round before moved up.
    while sweep.clear(root.as_fd(), 0).on("empty", dir)? {}
    Ok(())
}

/// Deletes a tree of directories in which nothing else is.
///
/// # Errors
/// A file, a link or a mount point is in it.
pub(super) fn remove_empty_dirs(dir: &Path) -> Result<(), VolumeError> {
    if !is_there(dir) {
        return Ok(());
    }
    for entry in fs::read_dir(dir).on("list", dir)? {
        let entry = entry.on("list", dir)?;
        if !entry.file_type().on("inspect", &entry.path())?.is_dir() {
            return Err(VolumeError::NotEmpty { path: dir.to_owned() });
        }
        // Volumes lie two levels down; what is deeper is content.
        fs::read_dir(entry.path()).on("list", &entry.path())?.flatten().try_for_each(|volume| {
            fs::remove_dir(volume.path()).map_err(|_| VolumeError::NotEmpty { path: volume.path() })
        })?;
        fs::remove_dir(entry.path()).on("remove", &entry.path())?;
    }
    fs::remove_dir(dir).on("remove", dir)
}

fn is_there(dir: &Path) -> bool {
    fs::symlink_metadata(dir).is_ok()
}

struct Sweep<'a> {
    root: BorrowedFd<'a>,
    moved: u64,
}

impl Sweep<'_> {
    /// Deletes what is in `dir`; true if something was moved to the root on the way.
    fn clear(&mut self, dir: BorrowedFd<'_>, depth: u32) -> io::Result<bool> {
        let mut moved = false;
        loop {
            let batch = entries(dir, BATCH)?;
            if batch.is_empty() {
                return Ok(moved);
            }
            for (name, kind) in batch {
                moved |= self.remove(dir, &name, kind, depth)?;
            }
            // Moved directories are in the root now: at depth 0 the next listing would meet them for ever.
            if moved && depth == 0 {
                return Ok(true);
            }
        }
    }

    fn remove(&mut self, dir: BorrowedFd<'_>, name: &CStr, kind: Option<Type>, depth: u32) -> io::Result<bool> {
        if kind != Some(Type::Directory) {
            match unlinkat(dir, name, UnlinkatFlags::NoRemoveDir) {
                // The kind is not always told.
                Err(Errno::EISDIR | Errno::EPERM) if kind.is_none() => {}
                Ok(()) | Err(Errno::ENOENT) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        if depth >= MAX_DEPTH {
            self.moved += 1;
            let up = CString::new(format!(".keblet-removal-{}", self.moved))?;
            renameat(dir, name, self.root, up.as_c_str())?;
            return Ok(true);
        }
        let below: OwnedFd = match openat2::open_dir(dir, name) {
            Err(error) if error.raw_os_error() == Some(libc::EXDEV) => {
                return Err(io::Error::other(format!("{name:?} is a mount point")));
            }
            result => result?,
        };
        let moved = self.clear(below.as_fd(), depth + 1)?;
        drop(below);
        unlinkat(dir, name, UnlinkatFlags::RemoveDir)?;
        Ok(moved)
    }
}

/// Up to `limit` names in a directory, without the two that every directory has.
fn entries(dir: BorrowedFd<'_>, limit: usize) -> io::Result<Vec<(CString, Option<Type>)>> {
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
