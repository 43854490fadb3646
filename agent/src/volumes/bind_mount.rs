//! Bind mounts of volumes into pods' directories.

use std::fs;
use std::io;
use std::path::Path;

use nix::mount::MsFlags;
use nix::mount::mount;
use nix::sys::statvfs::FsFlags;
use nix::sys::statvfs::statvfs;

use super::VolumeError;
use super::error::OnPath as _;
use super::layout::make_dirs;
use super::plugin::blocking;
use crate::filesystem;

/// True if something is mounted there; false if there is no such directory.
///
/// # Errors
/// It cannot be inspected.
pub(super) async fn is_there(target: &Path) -> Result<bool, VolumeError> {
    let target = target.to_owned();
    let found = move || match filesystem::is_mount_point(&target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        result => result.on("inspect", &target),
    };
    blocking(found).await
}

/// Mounts a directory on another one, which is made.
///
/// # Errors
/// A directory cannot be made, or the process may not mount. Nothing is left then.
pub(super) async fn make(source: &Path, target: &Path, read_only: bool) -> Result<(), VolumeError> {
    let (source, target) = (source.to_owned(), target.to_owned());
    blocking(move || {
        make_dirs(&target)?;
        let bound = bind(&source, &target, read_only);
        if bound.is_err() {
            let _ = fs::remove_dir(&target);
        }
        bound
    })
    .await
}

fn bind(source: &Path, target: &Path, read_only: bool) -> Result<(), VolumeError> {
    let bound = mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>);
    bound.on("bind mount the volume on", target)?;
    if !read_only {
        return Ok(());
    }
    let remounted = restrictions(target).and_then(|kept| {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | kept;
        mount(None::<&str>, target, None::<&str>, flags, None::<&str>)
    });
    if remounted.is_err() {
        let _ = filesystem::unmount(target);
    }
    remounted.on("make read-only", target)
}

/// What the mount inherits of its source. A remount would drop it.
fn restrictions(target: &Path) -> nix::Result<MsFlags> {
    let held = statvfs(target)?.flags();
    let all = [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ];
    Ok(all.into_iter().filter(|(has, _)| held.contains(*has)).map(|(_, flag)| flag).collect())
}

#[cfg(test)]
mod tests {
    use keblet_skip::mounts::in_private_mounts;

    use super::*;

    #[test]
    fn a_read_only_mount_keeps_what_its_source_forbids() {
        in_private_mounts(|| {
            let root = tempfile::tempdir().expect("a folder");
            let (source, target) = (root.path().join("source"), root.path().join("pod/volume"));
            fs::create_dir(&source).expect("a folder");
            let forbids = MsFlags::MS_NOEXEC | MsFlags::MS_NOSUID;
            mount(Some("tmpfs"), &source, Some("tmpfs"), forbids, None::<&str>).expect("a tmpfs");
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            assert!(!runtime.block_on(is_there(&target)).expect("asked"));
            runtime.block_on(make(&source, &target, true)).expect("mounted");
            assert!(runtime.block_on(is_there(&target)).expect("asked"));
            let flags = statvfs(&target).expect("a file system").flags();
            assert!(flags.contains(FsFlags::ST_RDONLY | FsFlags::ST_NOEXEC | FsFlags::ST_NOSUID), "{flags:?}");
            fs::write(source.join("f"), "").expect("the source is writable");

            let missing = root.path().join("pod/other");
            let error = runtime.block_on(make(&root.path().join("none"), &missing, false)).expect_err("no source");
            assert!(error.to_string().contains("bind mount the volume on") && !missing.exists(), "{error}");
        });
    }
}
