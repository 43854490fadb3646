//! Whether another pod uses a persistent volume that only one may use, by what is on disk: of pods that a predecessor of this
//! agent or another kubelet has started, and of those whose teardown is not over, nothing is in memory. As upstream, which counts
//! mounts that it found when it started.

use std::fs;
use std::io;
use std::path::Path;

use super::bound_volumes::BoundVolume;
use crate::filesystem;
use crate::volumes::PodDirs;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::layout;

/// True if a pod other than this one has the volume mounted, or mapped as a device. Waits for no server. Blocking.
///
/// # Errors
/// A directory cannot be read: whether the volume is in use is not known.
pub(super) fn is_in_use(dirs: &PodDirs, uid: &str, used: &BoundVolume) -> Result<bool, VolumeError> {
    let Some(plugin) = used.source.plugin() else { return Ok(false) };
    let directory = layout::escaped(plugin);
    let pods = layout::entries(&dirs.pods())?;
    for other in pods.iter().filter_map(|pod| pod.file_name()?.to_str()).filter(|other| *other != uid) {
        let is_there = match used.is_block {
            true => exists(&dirs.device(other, &directory, &used.name)?)?,
            false => is_mounted(&dirs.volume(other, &directory, &used.name)?)?,
        };
        if is_there {
            return Ok(true);
        }
    }
    Ok(false)
}

/// True if something is mounted there; false if there is no such path.
///
/// # Errors
/// That cannot be found out.
pub(super) fn is_mounted(path: &Path) -> Result<bool, VolumeError> {
    unless_absent(filesystem::is_mount_point(path)).on("inspect", path)
}

fn exists(path: &Path) -> Result<bool, VolumeError> {
    unless_absent(fs::symlink_metadata(path).map(|_| true)).on("inspect", path)
}

/// `false` for what does not exist, also below a file.
fn unless_absent(found: io::Result<bool>) -> io::Result<bool> {
    match found {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
        found => found,
    }
}
