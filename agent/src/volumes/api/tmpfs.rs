//! The directory of a volume, on disk or on a tmpfs that is not swapped.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::mount::mount;

use crate::filesystem;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::layout::make_dirs;
use crate::volumes::layout::set_mode;

/// False once `noswap` was refused: kernels before 6.4 and user namespaces do not have it
/// (<https://docs.kernel.org/filesystems/tmpfs.html>).
static NOSWAP: AtomicBool = AtomicBool::new(true);

/// Makes the directory, and with `memory` mounts a tmpfs on it, of at most so many bytes. What is there already stays.
pub(super) fn prepare(dir: &Path, memory: Option<Option<i64>>) -> Result<(), VolumeError> {
    if let Some(parent) = dir.parent() {
        make_dirs(parent)?;
    }
    match fs::DirBuilder::new().mode(0o777).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => {
            result.on("create", dir)?;
            // Restores bits that the umask cleared.
            set_mode(dir, 0o777)?;
        }
    }
    match memory {
        Some(size) if !filesystem::is_mount_point(dir).on("inspect", dir)? => {
            mount_memory(dir, size).on("mount tmpfs on", dir)
        }
        _ => Ok(()),
    }
}

/// Mounts a tmpfs of at most `size` bytes, whose pages are not swapped where the kernel supports that.
///
/// # Errors
/// That of mount(2).
pub(crate) fn mount_memory(dir: &Path, size: Option<i64>) -> nix::Result<()> {
    let size = size.filter(|size| *size > 0).map(|size| format!("size={size}"));
    if NOSWAP.load(Relaxed) {
        let options: Vec<&str> = size.as_deref().into_iter().chain(["noswap"]).collect();
        match mount_tmpfs(dir, Some(&options.join(","))) {
            Err(Errno::EINVAL) => NOSWAP.store(false, Relaxed),
            result => return result,
        }
    }
    mount_tmpfs(dir, size.as_deref())
}

/// True if swap is on.
pub(crate) fn machine_swaps() -> bool {
    has_swap(&fs::read_to_string("/proc/swaps").unwrap_or_default())
}

/// The table has a header, and a line for each area.
fn has_swap(table: &str) -> bool {
    table.lines().skip(1).any(|line| !line.trim().is_empty())
}

/// Tries whether tmpfs supports `noswap`, in a directory beside `dir`, which is removed afterwards.
///
/// # Errors
/// The directory cannot be created or removed, or the tmpfs cannot be mounted or unmounted for another reason.
pub(crate) fn can_avoid_swap(dir: &Path) -> Result<bool, VolumeError> {
    let trial = dir.with_file_name("noswap");
    make_dirs(&trial)?;
    // An agent that was killed during its trial has left the mount.
    if filesystem::is_mount_point(&trial).on("inspect", &trial)? {
        filesystem::unmount(&trial).on("unmount", &trial)?;
    }
    let mounted = mount_tmpfs(&trial, Some("noswap"));
    let left = if mounted.is_ok() { filesystem::unmount(&trial).on("unmount", &trial) } else { Ok(()) };
    left.and_then(|()| fs::remove_dir(&trial).on("remove", &trial))?;
    match mounted {
        Ok(()) => Ok(true),
        Err(Errno::EINVAL) => {
            NOSWAP.store(false, Relaxed);
            Ok(false)
        }
        Err(error) => Err(error).on("mount tmpfs on", &trial),
    }
}

fn mount_tmpfs(dir: &Path, options: Option<&str>) -> nix::Result<()> {
    mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_is_on_if_the_table_has_an_area() {
        let head = "Filename\t\t\t\tType\t\tSize\tUsed\tPriority\n";
        assert!(!has_swap(head) && !has_swap(""));
        assert!(has_swap(&format!("{head}/dev/sda2   partition\t999\t0\t-2\n")));
    }

    #[test]
    fn the_noswap_trial_leaves_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = nix::unistd::geteuid().is_root();
        if root {
            let trial = dir.path().join("noswap");
            fs::create_dir(&trial).expect("a folder");
            mount_tmpfs(&trial, None).expect("what a killed agent has left");
        }
        let answer = can_avoid_swap(&dir.path().join("pods"));
        if root {
            answer.expect("root may try");
        }
        assert_eq!(fs::read_dir(dir.path()).expect("a list").count(), 0);
    }
}
