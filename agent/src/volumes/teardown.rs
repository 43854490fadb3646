//! Removing a pod's volumes and its directory.
//!
//! Another kubelet may have left anything there. Every step down is made from an opened directory and fails at a mount
//! point; content is removed only where a plugin of this agent has put it, a mount is undone only where undoing it is all
//! that the volume's plugin would do. The rest stays, as upstream leaves it (`orphaned pod "<uid>" found, but ...`).

#[cfg(test)]
mod tests;

use std::ffi::CStr;
use std::ffi::CString;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;

use nix::dir::Type;
use nix::errno::Errno;
use nix::unistd::UnlinkatFlags;
use nix::unistd::unlinkat;

use super::PodDirs;
use super::VolumeError;
use super::actual_state;
use super::error::OnPath as _;
use super::layout;
use crate::filesystem;
use crate::filesystem::DirectoryEntry;

/// Plugins that only mount, from sources that unmounting leaves as they are.
const MOUNT_ONLY: [&str; 2] = ["kubernetes.io~nfs", "kubernetes.io~local-volume"];

/// What removes a volume of a plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cleanup {
    /// Unmounting memory, deleting content: the plugin is one of this agent's.
    Delete,
    /// Unmounting.
    Unmount,
    /// Nothing, unless it is an empty directory.
    Leave,
}

impl Cleanup {
    /// For a plugin's directory in a pod's `volumes`.
    fn of(directory: &str) -> Self {
        match actual_state::named(directory) {
            Some(_) => Self::Delete,
            None if MOUNT_ONLY.contains(&directory) => Self::Unmount,
            None => Self::Leave,
        }
    }

    fn run(self, dir: &Directory, (name, kind): &DirectoryEntry) -> Result<(), VolumeError> {
        match self {
            Self::Delete => {
                while dir.is_mounted(name)? && filesystem::lies_in_memory(&dir.fd, name).on("inspect", &dir.at(name))? {
                    dir.unmount(name, true)?;
                }
                dir.remove(name, *kind)
            }
            Self::Unmount => {
                while dir.is_mounted(name)? {
                    dir.unmount(name, false)?;
                }
                dir.remove_empty(name)
            }
            Self::Leave => dir.remove_empty(name),
        }
    }
}

/// A directory of the agent, opened, and its path for messages.
pub(super) struct Directory {
    fd: OwnedFd,
    path: PathBuf,
}

impl Directory {
    /// The directory of a pod; `None` if it has none.
    pub(super) fn of_pod(dirs: &PodDirs, uid: &str) -> Result<Option<Self>, VolumeError> {
        let (pods, pod) = (dirs.pods(), dirs.pod(uid)?);
        let all = match pods.canonicalize().and_then(|path| filesystem::open_root(&path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            result => Self { fd: result.on("open", &pods)?, path: pods },
        };
        all.open(&name_of(&pod)?)
    }

    /// A directory in this one; `None` if there is none.
    fn open(&self, name: &CStr) -> Result<Option<Self>, VolumeError> {
        let path = self.at(name);
        match filesystem::open_dir(&self.fd, name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::CrossesDevices => Err(VolumeError::MountPoint { path }),
            result => Ok(Some(Self { fd: result.on("open", &path)?, path })),
        }
    }

    fn entries(&self) -> Result<Vec<DirectoryEntry>, VolumeError> {
        filesystem::entries(&self.fd).on("list", &self.path)
    }

    fn at(&self, name: &CStr) -> PathBuf {
        self.path.join(OsStr::from_bytes(name.to_bytes()))
    }

    fn is_mounted(&self, name: &CStr) -> Result<bool, VolumeError> {
        match filesystem::is_mount_point_at(&self.fd, name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            result => result.on("inspect", &self.at(name)),
        }
    }

    fn unmount(&self, name: &CStr, lazily: bool) -> Result<(), VolumeError> {
        filesystem::unmount_at(&self.fd, name, lazily).on("unmount", &self.at(name))
    }

    fn remove(&self, name: &CStr, kind: Option<Type>) -> Result<(), VolumeError> {
        filesystem::remove_entry(&self.fd, name, kind).on("remove", &self.at(name))
    }

    fn remove_file(&self, name: &CStr) -> Result<(), VolumeError> {
        match unlinkat(&self.fd, name, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::ENOENT) => Ok(()),
            result => result.on("remove", &self.at(name)),
        }
    }

    /// Removes a directory that is empty.
    fn remove_empty(&self, name: &CStr) -> Result<(), VolumeError> {
        let path = self.at(name);
        match unlinkat(&self.fd, name, UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => Ok(()),
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => Err(VolumeError::NotEmpty { path }),
            Err(Errno::EBUSY) => Err(VolumeError::MountPoint { path }),
            result => result.on("remove", &path),
        }
    }

    /// Removes a directory's directories if they are empty, and then itself.
    fn remove_empty_below(&self, name: &CStr) -> Result<(), VolumeError> {
        let Some(dir) = self.open(name)? else { return Ok(()) };
        dir.entries()?.iter().try_for_each(|(name, _)| dir.remove_empty(name))?;
        self.remove_empty(name)
    }
}

/// Tears down all volumes of a pod and tells `removed` of each: plugin's directory, volume, how long it took, whether it
/// is gone. A failure does not keep the other volumes.
///
/// # Errors
/// The first volume that stays.
pub(super) fn volumes(pod: &Directory, removed: impl Fn(&str, &str, Duration, bool)) -> Result<(), VolumeError> {
    unmount_sub_paths(pod)?;
    let mut all = Ok(());
    if let Some(volumes) = pod.open(&name(layout::VOLUMES))? {
        for (plugin, _) in volumes.entries()? {
            all = all.and(volumes_of_plugin(&volumes, &plugin, &removed));
        }
    }
    all = all.and(pod.remove_empty_below(&name(layout::DEVICES)));
    all.and_then(|()| remove_markers(pod))
}

fn volumes_of_plugin(
    volumes: &Directory,
    plugin: &CStr,
    removed: &impl Fn(&str, &str, Duration, bool),
) -> Result<(), VolumeError> {
    let Some(dir) = volumes.open(plugin)? else { return Ok(()) };
    let directory = plugin.to_string_lossy();
    let (cleanup, mut all) = (Cleanup::of(&directory), Ok(()));
    for entry in dir.entries()? {
        let began = Instant::now();
        let done = cleanup.run(&dir, &entry);
        removed(&directory, &entry.0.to_string_lossy(), began.elapsed(), done.is_ok());
        all = all.and(done);
    }
    all.and_then(|()| volumes.remove_empty(plugin))
}

/// Unmounts every subPath (`<volume>/<container>/<index>`) and removes what they were mounted on.
fn unmount_sub_paths(pod: &Directory) -> Result<(), VolumeError> {
    let Some(root) = pod.open(&name(layout::SUB_PATHS))? else { return Ok(()) };
    for (volume, _) in root.entries()? {
        let Some(of_volume) = root.open(&volume)? else { continue };
        for (container, _) in of_volume.entries()? {
            let Some(of_container) = of_volume.open(&container)? else { continue };
            for (index, kind) in of_container.entries()? {
                while of_container.is_mounted(&index)? {
                    of_container.unmount(&index, true)?;
                }
                match kind {
                    Some(Type::Directory) => of_container.remove_empty(&index)?,
                    _ => of_container.remove_file(&index)?,
                }
            }
            of_volume.remove_empty(&container)?;
        }
        root.remove_empty(&volume)?;
    }
    pod.remove_empty(&name(layout::SUB_PATHS))
}

/// Removes what this agent's plugins have noted of a pod's volumes.
fn remove_markers(pod: &Directory) -> Result<(), VolumeError> {
    let Some(plugins) = pod.open(&name(layout::PLUGINS))? else { return Ok(()) };
    let mut entries = plugins.entries()?;
    entries.retain(|(directory, _)| Cleanup::of(&directory.to_string_lossy()) == Cleanup::Delete);
    entries.iter().try_for_each(|(directory, kind)| plugins.remove(directory, *kind))
}

/// Removes the directory of a pod whose volumes are torn down. Content of volumes is not removed here.
///
/// # Errors
/// A volume that is left; a mount point; something the kernel refuses to remove.
pub(super) fn pod(pod: &Directory, dirs: &PodDirs) -> Result<(), VolumeError> {
    let of_volumes = [layout::SUB_PATHS, layout::VOLUMES, layout::DEVICES].map(name);
    of_volumes.iter().try_for_each(|name| pod.remove_empty_below(name))?;
    for (name, kind) in pod.entries()? {
        // Volumes of a pod that has come back meanwhile.
        if of_volumes.contains(&name) {
            return Err(VolumeError::NotEmpty { path: pod.at(&name) });
        }
        pod.remove(&name, kind)?;
    }
    let pods = dirs.pods();
    let all = pods.canonicalize().and_then(|path| filesystem::open_root(&path)).on("open", &pods)?;
    Directory { fd: all, path: pods }.remove_empty(&name_of(&pod.path)?)
}

/// A name of the layout.
fn name(name: &str) -> CString {
    // Names of the layout are constants without NUL.
    CString::new(name).unwrap_or_default()
}

fn name_of(path: &Path) -> Result<CString, VolumeError> {
    let name = path.file_name().unwrap_or_default().as_bytes();
    CString::new(name).map_err(|_| VolumeError::NotAFileName { name: path.display().to_string() })
}
