//! Opening files without leaving a directory: no links, no mount points, no way up.

use std::io;
use std::os::fd::AsFd;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::fcntl::OFlag;
use nix::fcntl::OpenHow;
use nix::fcntl::ResolveFlag;
use nix::fcntl::open;
use nix::fcntl::openat2;
use nix::sys::stat::Mode;

/// Opens a directory by its path on the host; the last component must not be a link.
pub(super) fn open_root(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_RDONLY;
    Ok(open(path, flags, Mode::empty())?)
}

/// Opens what is at `path` below `dir`, links refused wherever they are. The result names the file and nothing more
/// (`O_PATH`).
pub(super) fn open_path(dir: impl AsFd, path: &Path) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    Ok(openat2(dir, path, how)?)
}

/// Opens a directory directly in `dir` for reading; a link or a mount point is refused.
pub(super) fn open_dir(dir: impl AsFd, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_DIRECTORY | OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV);
    Ok(openat2(dir, name, how)?)
}
