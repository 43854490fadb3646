//! Removes a pod's volumes and its directory.
//!
//! Another kubelet may have left anything there. Every step down is made from an opened directory and fails at a mount
//! point. Plugins decide what is unmounted and deleted of their volumes; those of unknown plugins stay unless they
//! contain only directories, as upstream leaves them (`orphaned pod "<uid>" found, but ...`).

#[cfg(test)]
mod tests;

use std::ffi::CStr;
use std::ffi::CString;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use nix::dir::Type;
use nix::errno::Errno;
use nix::unistd::UnlinkatFlags;
use nix::unistd::unlinkat;

use super::PodDirs;
use super::VolumeError;
use super::error::OnPath as _;
use super::layout;
use crate::filesystem;
use crate::filesystem::DirectoryEntry;

/// A volume that a pod has on disk, by any kubelet.
#[derive(Clone, Debug)]
pub(super) struct VolumeOnDisk {
    dirs: PodDirs,
    uid: String,
    /// Its plugin's directory, as `kubernetes.io~secret`.
    pub(super) directory: String,
    name: CString,
}

impl VolumeOnDisk {
    /// The volume's name.
    pub(super) fn volume(&self) -> String {
        self.name.to_string_lossy().into_owned()
    }

    /// Its directory.
    pub(super) fn path(&self) -> PathBuf {
        let of_pod = self.dirs.pods().join(&self.uid).join(layout::VOLUMES);
        of_pod.join(&self.directory).join(OsStr::from_bytes(self.name.to_bytes()))
    }

    /// Unmounts a volume in memory, and deletes the volume with its content. Blocking.
    ///
    /// # Errors
    /// Something else is mounted on the volume or below it; the kernel refuses to remove something.
    pub(super) fn delete(&self) -> Result<(), VolumeError> {
        self.in_plugins_directory(|dir, name| {
            while dir.is_mounted(name)? && filesystem::lies_in_memory(&dir.fd, name).on("inspect", &dir.at(name))? {
                dir.unmount(name, true)?;
            }
            dir.remove(name, None)
        })
    }

    /// Unmounts the volume and removes its directory, which must be empty then. Blocking.
    ///
    /// # Errors
    /// The volume is in use; there is content under the mount.
    pub(super) fn unmount(&self) -> Result<(), VolumeError> {
        self.in_plugins_directory(|dir, name| {
            while dir.is_mounted(name)? {
                dir.unmount(name, false)?;
            }
            dir.remove_empty(name)
        })
    }

    /// As [`Self::unmount`], for a volume whose server does not answer: what waits for it fails. Blocking.
    ///
    /// # Errors
    /// As [`Self::unmount`].
    pub(super) fn force_unmount(&self) -> Result<(), VolumeError> {
        self.in_plugins_directory(|dir, name| {
            while dir.is_mounted(name)? {
                filesystem::force_unmount_at(&dir.fd, name).on("unmount", &dir.at(name))?;
            }
            dir.remove_empty(name)
        })
    }

    /// Removes the volume's directory if it contains only directories, which another kubelet may have left. Blocking.
    ///
    /// # Errors
    /// There is content, or a mount.
    pub(super) fn remove_if_empty(&self) -> Result<(), VolumeError> {
        self.in_plugins_directory(Directory::remove_directories)
    }

    fn in_plugins_directory(
        &self,
        work: impl FnOnce(&Directory, &CStr) -> Result<(), VolumeError>,
    ) -> Result<(), VolumeError> {
        let Some(pod) = Directory::of_pod(&self.dirs, &self.uid)? else { return Ok(()) };
        let Some(volumes) = pod.open(&name(layout::VOLUMES))? else { return Ok(()) };
        match volumes.open(&name(&self.directory))? {
            Some(dir) => work(&dir, &self.name),
            None => Ok(()),
        }
    }
}

/// A directory of the agent, opened, and its path for messages.
struct Directory {
    fd: OwnedFd,
    path: PathBuf,
}

impl Directory {
    /// The directory of all pods; `None` if there is none.
    fn of_all(dirs: &PodDirs) -> Result<Option<Self>, VolumeError> {
        let path = dirs.pods();
        // The way there is the operator's and may have links.
        match path.canonicalize().and_then(|path| filesystem::open_root(&path)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            result => Ok(Some(Self { fd: result.on("open", &path)?, path })),
        }
    }

    /// The directory of a pod; `None` if it has none.
    fn of_pod(dirs: &PodDirs, uid: &str) -> Result<Option<Self>, VolumeError> {
        // Checks the UID.
        dirs.pod(uid)?;
        match Self::of_all(dirs)? {
            Some(all) => all.open(&name(uid)),
            None => Ok(None),
        }
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

    /// Removes a directory that contains only directories.
    fn remove_directories(&self, name: &CStr) -> Result<(), VolumeError> {
        let path = self.at(name);
        match filesystem::remove_directories(&self.fd, name) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Err(VolumeError::NotEmpty { path }),
            // The error names the mount point, which may be below.
            result => result.on("remove", &path),
        }
    }

    /// Removes a directory that is empty, or a file. Which of them it is, some file systems do not list (XFS with `ftype=0`).
    fn remove_empty_or_file(&self, name: &CStr) -> Result<(), VolumeError> {
        match self.remove_empty(name) {
            Err(VolumeError::Io { source, .. }) if source.kind() == io::ErrorKind::NotADirectory => {
                self.remove_file(name)
            }
            result => result,
        }
    }

    /// Removes a directory's directories if they are empty, and then itself.
    fn remove_empty_below(&self, name: &CStr) -> Result<(), VolumeError> {
        let Some(dir) = self.open(name)? else { return Ok(()) };
        dir.entries()?.iter().try_for_each(|(name, _)| dir.remove_empty(name))?;
        self.remove_empty(name)
    }
}

/// What a pod has on disk.
pub(super) struct Found {
    pub(super) volumes: Vec<VolumeOnDisk>,
    /// A directory that could not be read; it does not keep the volumes of others.
    pub(super) failed: Result<(), VolumeError>,
}

/// Unmounts a pod's subPaths and lists its volumes. `None` if it has no directory. Blocking.
///
/// # Errors
/// A subPath that cannot be unmounted.
pub(super) fn begin(dirs: &PodDirs, uid: &str) -> Result<Option<Found>, VolumeError> {
    let Some(pod) = Directory::of_pod(dirs, uid)? else { return Ok(None) };
    unmount_sub_paths(&pod)?;
    let mut found = Found { volumes: Vec::new(), failed: Ok(()) };
    let Some(volumes) = pod.open(&name(layout::VOLUMES))? else { return Ok(Some(found)) };
    for (plugin, _) in volumes.entries()? {
        match volumes.open(&plugin).and_then(|dir| dir.map_or(Ok(Vec::new()), |dir| dir.entries())) {
            Ok(entries) => found.volumes.extend(entries.into_iter().map(|(name, _)| VolumeOnDisk {
                dirs: dirs.clone(),
                uid: uid.to_owned(),
                directory: plugin.to_string_lossy().into_owned(),
                name,
            })),
            Err(error) => found.failed = found.failed.and(Err(error)),
        }
    }
    Ok(Some(found))
}

/// Removes the directories of plugins whose volumes are torn down, and the markers of plugins that `owns`. Blocking.
///
/// # Errors
/// A volume is left.
pub(super) fn end(dirs: &PodDirs, uid: &str, owns: impl Fn(&str) -> bool) -> Result<(), VolumeError> {
    let Some(pod) = Directory::of_pod(dirs, uid)? else { return Ok(()) };
    let mut all = Ok(());
    if let Some(volumes) = pod.open(&name(layout::VOLUMES))? {
        for (plugin, _) in volumes.entries()? {
            all = all.and(volumes.remove_empty(&plugin));
        }
    }
    all.and(pod.remove_empty_below(&name(layout::DEVICES)))?;
    let Some(plugins) = pod.open(&name(layout::PLUGINS))? else { return Ok(()) };
    let mut entries = plugins.entries()?;
    entries.retain(|(directory, _)| owns(&directory.to_string_lossy()));
    entries.iter().try_for_each(|(directory, kind)| plugins.remove(directory, *kind))
}

/// Unmounts every subPath (`<volume>/<container>/<index>`) and removes what they were mounted on.
fn unmount_sub_paths(pod: &Directory) -> Result<(), VolumeError> {
    let Some(root) = pod.open(&name(layout::SUB_PATHS))? else { return Ok(()) };
    for (volume, _) in root.entries()? {
        let Some(of_volume) = root.open(&volume)? else { continue };
        for (container, _) in of_volume.entries()? {
            let Some(of_container) = of_volume.open(&container)? else { continue };
            for (index, _) in of_container.entries()? {
                while of_container.is_mounted(&index)? {
                    of_container.unmount(&index, true)?;
                }
                of_container.remove_empty_or_file(&index)?;
            }
            of_volume.remove_empty(&container)?;
        }
        root.remove_empty(&volume)?;
    }
    pod.remove_empty(&name(layout::SUB_PATHS))
}

/// Removes the directory of a pod whose volumes are torn down. Content of volumes is not removed here. Blocking.
///
/// # Errors
/// A volume that is left; a mount point; something the kernel refuses to remove.
pub(super) fn remove_pod(dirs: &PodDirs, uid: &str) -> Result<(), VolumeError> {
    let Some(pod) = Directory::of_pod(dirs, uid)? else { return Ok(()) };
    let of_volumes = [layout::SUB_PATHS, layout::VOLUMES, layout::DEVICES].map(name);
    of_volumes.iter().try_for_each(|name| pod.remove_empty_below(name))?;
    for (name, kind) in pod.entries()? {
        // Volumes of a pod that has come back meanwhile.
        if of_volumes.contains(&name) {
            return Err(VolumeError::NotEmpty { path: pod.at(&name) });
        }
        pod.remove(&name, kind)?;
    }
    Directory::of_all(dirs)?.map_or(Ok(()), |all| all.remove_empty(&name(uid)))
}

/// A name that is known to be a file name.
fn name(name: &str) -> CString {
    // Neither names of the layout nor names that `PodDirs` accepts or a directory lists have a NUL.
    CString::new(name).unwrap_or_default()
}
