//! `openat2(2)` with the restrictions of this module.

use std::ffi::CStr;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::fcntl::OpenHow;
use nix::fcntl::ResolveFlag;
use nix::fcntl::open;
use nix::fcntl::openat2;
use nix::sys::stat::Mode;

/// Tries whether this process can use `openat2`.
///
/// # Errors
/// Linux before 5.6 does not have it, or a seccomp filter forbids it.
pub fn try_openat2() -> io::Result<()> {
    open_path(std::fs::File::open("/")?, Path::new(".")).map(drop)
}

/// Opens a directory by its path on the host. Links before the last component are followed.
///
/// # Errors
/// The directory cannot be opened, or its last component is a link.
pub fn open_root(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
    Ok(open(path, flags, Mode::empty())?)
}

/// Opens the file at `path` below `dir` without following links. The descriptor names the file only (`O_PATH`).
///
/// # Errors
/// The file cannot be opened, a component is a link, or the path leaves `dir`.
pub fn open_path(dir: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    Ok(openat2(dir, path, how)?)
}

/// Opens the file at `path` below the directory `root`. Relative links are followed as long as they stay inside; absolute
/// ones leave it. The descriptor names the file only (`O_PATH`).
///
/// # Errors
/// The file cannot be opened, or the path or a link leaves `root`.
pub fn open_below(root: &Path, path: &Path) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    match openat2(std::fs::File::open(root)?, path, how) {
        Err(Errno::EXDEV) => Err(io::Error::new(io::ErrorKind::PermissionDenied, "path escapes from parent")),
        result => Ok(result?),
    }
}

/// Opens a directory directly in `dir` for reading.
///
/// # Errors
/// The directory cannot be opened; it is a link; [`io::ErrorKind::CrossesDevices`] if something is mounted on it, also
/// from the same file system.
pub fn open_dir(dir: impl AsFd, name: &CStr) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV);
    match openat2(dir, name, how) {
        Err(Errno::EXDEV) => Err(mount_point(name)),
        result => Ok(result?),
    }
}

/// The error for a name on which something is mounted.
pub(super) fn mount_point(name: &CStr) -> io::Error {
    io::Error::new(io::ErrorKind::CrossesDevices, format!("{name:?} is a mount point"))
}
