//! Mount points: detecting and unmounting them.

use std::ffi::CStr;
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::AsRawFd as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::fcntl::OpenHow;
use nix::fcntl::ResolveFlag;
use nix::fcntl::open;
use nix::fcntl::openat2;
use nix::mount::MntFlags;
use nix::mount::umount2;
use nix::sys::stat::Mode;
use nix::sys::statfs::HUGETLBFS_MAGIC;
use nix::sys::statfs::TMPFS_MAGIC;
use nix::sys::statfs::fstatfs;

/// True if something is mounted on this directory or file, also from the same file system.
///
/// # Errors
/// There is no such file, or its directory cannot be opened.
pub fn is_mount_point(path: &Path) -> io::Result<bool> {
    let Some((parent, name)) = path.parent().zip(path.file_name()) else { return Ok(true) };
    let parent = open(parent, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    is_mount_point_at(&parent, &std::ffi::CString::new(name.as_bytes())?)
}

/// True if something is mounted on `name` in `dir`, also from the same file system.
///
/// # Errors
/// There is no such file.
pub fn is_mount_point_at(dir: impl AsFd, name: &CStr) -> io::Result<bool> {
    match open_node(dir, name, ResolveFlag::RESOLVE_NO_XDEV) {
        Ok(_) => Ok(false),
        Err(Errno::EXDEV) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// True if what `name` in `dir` leads to, mounts followed, is a tmpfs or hugetlbfs.
///
/// # Errors
/// There is no such file, or the kernel does not say.
pub fn lies_in_memory(dir: impl AsFd, name: &CStr) -> io::Result<bool> {
    let kind = fstatfs(open_node(dir, name, ResolveFlag::empty())?)?.filesystem_type();
    Ok(kind == TMPFS_MAGIC || kind == HUGETLBFS_MAGIC)
}

fn open_node(dir: impl AsFd, name: &CStr, resolve: ResolveFlag) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(resolve | ResolveFlag::RESOLVE_BENEATH);
    openat2(dir, name, how)
}

/// Detaches the topmost mount; processes that use it keep it until they close it (`MNT_DETACH`).
///
/// # Errors
/// Nothing is mounted there, or the process may not unmount.
pub fn unmount(target: &Path) -> io::Result<()> {
    Ok(umount2(target, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)?)
}

/// True if the server of a mounted file system is gone or no longer serves it, by the error of an access: nothing works but
/// unmounting it. As upstream's `IsCorruptedMnt`.
pub fn is_disconnected(error: &io::Error) -> bool {
    // EAGAIN is EWOULDBLOCK.
    let errors =
        [Errno::ENOTCONN, Errno::ESTALE, Errno::EIO, Errno::EACCES, Errno::EHOSTDOWN, Errno::EAGAIN, Errno::ENODEV];
    error.raw_os_error().is_some_and(|code| errors.contains(&Errno::from_raw(code)))
}

/// Unmounts the topmost mount, unless it is in use. What was written to it is on its device then.
///
/// # Errors
/// Nothing is mounted there, it is in use, or the process may not unmount.
pub fn unmount_flushed(target: &Path) -> io::Result<()> {
    Ok(umount2(target, MntFlags::UMOUNT_NOFOLLOW)?)
}

/// Unmounts the topmost mount on `name` in `dir`; with `lazily` also one in use, as [`unmount`] does.
///
/// # Errors
/// Nothing is mounted there, it is in use, or the process may not unmount.
pub fn unmount_at(dir: impl AsFd, name: &CStr, lazily: bool) -> io::Result<()> {
    unmount_with(dir, name, if lazily { MntFlags::MNT_DETACH } else { MntFlags::empty() })
}

/// As [`unmount_at`], and fails what waits for the server of a network file system (`MNT_FORCE`).
///
/// # Errors
/// As [`unmount_at`].
pub fn force_unmount_at(dir: impl AsFd, name: &CStr) -> io::Result<()> {
    unmount_with(dir, name, MntFlags::MNT_FORCE)
}

fn unmount_with(dir: impl AsFd, name: &CStr, flags: MntFlags) -> io::Result<()> {
    let path = PathBuf::from(format!("/proc/self/fd/{}", dir.as_fd().as_raw_fd()));
    Ok(umount2(&path.join(OsStr::from_bytes(name.to_bytes())), flags | MntFlags::UMOUNT_NOFOLLOW)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_a_mount_whose_server_is_gone() {
        let of = |errno: Errno| is_disconnected(&io::Error::from(errno));
        for errno in [Errno::ENOTCONN, Errno::ESTALE, Errno::EIO, Errno::EACCES, Errno::EHOSTDOWN] {
            assert!(of(errno), "{errno}");
        }
        assert!(of(Errno::ENODEV) && of(Errno::EWOULDBLOCK), "the device is gone, or does not answer");
        assert!(!of(Errno::ENOENT) && !of(Errno::ENOTDIR), "nothing is there");
    }
}
