//! Mount points: telling them, and taking them away.

use std::fs;
use std::io;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::fcntl::OpenHow;
use nix::fcntl::ResolveFlag;
use nix::fcntl::openat2;
use nix::mount::MntFlags;
use nix::mount::umount2;

use super::openat2;

/// A directory or file on which something is mounted, also from the same file system.
pub(super) fn is_mount_point(path: &Path) -> io::Result<bool> {
    let Some((parent, name)) = path.parent().zip(path.file_name()) else { return Ok(true) };
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_XDEV);
    match openat2(openat2::open_root(parent)?, name, how) {
        Ok(_) => Ok(false),
        Err(Errno::EXDEV) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Takes the topmost mount away; whoever still uses it keeps it until they are done.
pub(super) fn unmount(target: &Path) -> io::Result<()> {
    Ok(umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)?)
}

/// What is in a directory; nothing if it is not there.
pub(super) fn children(dir: &Path) -> Vec<std::path::PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}
