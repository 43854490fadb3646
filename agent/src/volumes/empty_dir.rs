//! emptyDir on disk.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::fs::chown;

use super::PodDirs;
use super::VolumeError;
use super::error::OnPath as _;
use super::make_dirs;
use super::set_mode;

/// Makes the directory, open to everyone inside the pod. Set up once, marked as ready; a directory that vanished is
/// made again, empty.
pub(super) fn set_up(dirs: &PodDirs, uid: &str, volume: &str, fs_group: Option<u32>) -> Result<(), VolumeError> {
    let dir = dirs.empty_dir(uid, volume)?;
    let marker = dirs.ready_marker(uid, volume)?;
    if marker.exists() && dir.is_dir() {
        return Ok(());
    }
    if let Some(parent) = dir.parent() {
        make_dirs(parent)?;
    }
    match fs::DirBuilder::new().mode(0o777).create(&dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => result.on("create", &dir)?,
    }
    // Whatever the umask took away.
    set_mode(&dir, 0o777)?;
    if let Some(group) = fs_group {
        share(&dir, group);
    }
    if let Some(parent) = marker.parent() {
        make_dirs(parent)?;
    }
    fs::write(&marker, "").on("create", &marker)
}

/// New files belong to the pod's group. A volume without it is better than none.
fn share(dir: &std::path::Path, group: u32) {
    let result = chown(dir, None, Some(group)).on("change the group of", dir);
    if let Err(error) = result.and_then(|()| set_mode(dir, 0o2777)) {
        tracing::warn!(group, %error, "fsGroup not applied");
    }
}
