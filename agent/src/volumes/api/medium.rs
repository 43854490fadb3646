//! What a volume lies on: a directory, or memory that is never written to a disk.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::mount::mount;

use super::Kind;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::make_dirs;
use crate::volumes::mounts;
use crate::volumes::set_mode;

/// Kernels before 6.4, and user namespaces, cannot keep memory from being swapped.
static NOSWAP: AtomicBool = AtomicBool::new(true);

/// Makes the directory, and with `memory` mounts memory on it, of at most so many bytes. What is there already stays.
pub(super) fn prepare(dir: &Path, memory: Option<Option<i64>>) -> Result<(), VolumeError> {
    if let Some(parent) = dir.parent() {
        make_dirs(parent)?;
    }
    match fs::DirBuilder::new().mode(0o777).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => {
            result.on("create", dir)?;
            // Whatever the umask took away.
            set_mode(dir, 0o777)?;
        }
    }
    match memory {
        Some(size) if !mounts::is_mount_point(dir).on("inspect", dir)? => {
            mount_memory(dir, size).on("mount tmpfs on", dir)
        }
        _ => Ok(()),
    }
}

fn mount_memory(dir: &Path, size: Option<i64>) -> nix::Result<()> {
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

fn mount_tmpfs(dir: &Path, options: Option<&str>) -> nix::Result<()> {
    mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), options)
}

/// Unmounts the memory of every such volume below a pod's `volumes` directory.
pub(crate) fn unmount_all(volumes: &Path) -> Result<(), VolumeError> {
    for kind in [Kind::Secret, Kind::DownwardApi, Kind::Projected] {
        for dir in mounts::children(&volumes.join(kind.plugin())) {
            while mounts::is_mount_point(&dir).on("inspect", &dir)? {
                mounts::unmount(&dir).on("unmount", &dir)?;
            }
        }
    }
    Ok(())
}
