//! Files of pods on the node: their directories, emptyDir (on disk) and hostPath volumes, subPaths; and how all of it
//! goes away again. Synchronous: what can take long (removing trees) is for a blocking task.
//!
//! Refuses volumes of other kinds (they are refused at admission), never follows a link out of a volume, and never
//! deletes across a mount point.
//!
//! ```text
//!  <root>/pods/<uid>/volumes/kubernetes.io~empty-dir/<volume>   content
//!                   /plugins/kubernetes.io~empty-dir/<volume>/ready
//!                   /volume-subpaths/<volume>/<container>/<index>   bind mounts
//!                   /containers/<container>/<8 hex>   termination messages
//!                   /etc-hosts
//! ```

mod beneath;
mod empty_dir;
mod error;
mod host_path;
mod layout;
mod removal;
mod sub_path;
#[cfg(test)]
mod tests;

use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeMount;

pub use error::VolumeError;
pub use layout::PodDirs;

use error::OnPath as _;

use crate::model::spec;

/// The volumes of all pods below one root directory (`--root-dir`).
#[derive(Clone, Debug)]
pub struct Volumes {
    dirs: PodDirs,
}

impl Volumes {
    /// Volumes below `root`.
    pub fn new(root: &Path) -> Self {
        Self { dirs: PodDirs::new(root) }
    }

    /// Where things are.
    pub fn dirs(&self) -> &PodDirs {
        &self.dirs
    }

    /// Makes the pod's directories, as far as missing.
    ///
    /// # Errors
    /// A UID that is no file name; a directory that cannot be made.
    pub fn make_pod_dirs(&self, uid: &str) -> Result<(), VolumeError> {
        let pod = self.dirs.pod(uid)?;
        for dir in [pod.clone(), pod.join(layout::VOLUMES), pod.join(layout::PLUGINS)] {
            make_dir(&dir)?;
        }
        Ok(())
    }

    /// Sets up every volume that a container mounts. What is set up already is left alone, except that hostPath types
    /// are checked anew.
    ///
    /// # Errors
    /// The first volume that cannot be set up.
    pub fn set_up(&self, pod: &Pod) -> Result<(), VolumeError> {
        for volume in mounted_volumes(pod) {
            if let Some(source) = &volume.host_path {
                host_path::check(&source.path, source.type_.as_deref().unwrap_or_default())?;
            } else if volume.empty_dir.is_some() {
                empty_dir::set_up(&self.dirs, uid_of(pod), &volume.name, fs_group(pod))?;
            } else {
                return Err(VolumeError::Unsupported { volume: volume.name.clone() });
            }
        }
        Ok(())
    }

    /// The host path behind one `volumeMounts` entry; `sub_path` is `subPath` or the expanded `subPathExpr`, `index`
    /// the entry's position. With a subPath the volume's part is bind mounted, so that nobody can swap it for a link.
    ///
    /// # Errors
    /// There is no such volume; the subPath leads out of it or cannot be mounted.
    pub fn mount_source(
        &self,
        pod: &Pod,
        container: &str,
        index: usize,
        mount: &VolumeMount,
        sub_path: Option<&str>,
    ) -> Result<PathBuf, VolumeError> {
        let volume = volumes(pod).find(|volume| volume.name == mount.name);
        let volume = volume.ok_or_else(|| VolumeError::NoSuchVolume { volume: mount.name.clone() })?;
        let path = match &volume.host_path {
            Some(source) => PathBuf::from(&source.path),
            None => self.dirs.empty_dir(uid_of(pod), &volume.name)?,
        };
        let Some(sub_path) = sub_path.filter(|sub_path| !sub_path.is_empty()) else { return Ok(path) };
        let target = self.dirs.sub_path(uid_of(pod), &volume.name, container, index)?;
        sub_path::bind(&path, sub_path, &target).map_err(|source| VolumeError::SubPath {
            volume: mount.name.clone(),
            container: container.to_owned(),
            source,
        })?;
        Ok(target)
    }

    /// Unmounts and deletes the pod's volumes; its other files stay. Blocking.
    ///
    /// # Errors
    /// Something that cannot be unmounted or deleted.
    pub fn tear_down(&self, uid: &str) -> Result<(), VolumeError> {
        let pod = self.dirs.pod(uid)?;
        sub_path::unmount_all(&pod.join(layout::SUB_PATHS))?;
        removal::remove_tree(&pod.join(layout::SUB_PATHS))?;
        removal::remove_contents(&pod.join(layout::VOLUMES))?;
        removal::remove_contents(&pod.join(layout::PLUGINS))
    }

    /// True if nothing of the pod's volumes is left.
    pub fn is_torn_down(&self, uid: &str) -> bool {
        let Ok(pod) = self.dirs.pod(uid) else { return true };
        let is_empty = |dir: PathBuf| std::fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none());
        !pod.join(layout::SUB_PATHS).exists() && is_empty(pod.join(layout::VOLUMES))
    }

    /// UIDs of pods that have a directory.
    ///
    /// # Errors
    /// The directory of all pods cannot be read (a missing one has no pods).
    pub fn pods_on_disk(&self) -> Result<Vec<String>, VolumeError> {
        let dir = self.dirs.pods();
        let entries = match std::fs::read_dir(&dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            result => result.on("list", &dir)?,
        };
        let dirs = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        Ok(dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    /// Removes the directory of a pod that is no more. Content of volumes is not deleted here: a volume that still has
    /// some keeps the directory. Blocking.
    ///
    /// # Errors
    /// A volume that is not torn down; something that cannot be deleted.
    pub fn remove_orphan(&self, uid: &str) -> Result<(), VolumeError> {
        let pod = self.dirs.pod(uid)?;
        removal::remove_empty_dirs(&pod.join(layout::SUB_PATHS))?;
        removal::remove_empty_dirs(&pod.join(layout::VOLUMES))?;
        removal::remove_tree(&pod)
    }

    /// Makes an empty file for a container's termination message and returns its path. One per attempt; it stays until
    /// the pod's directory goes.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn make_termination_file(&self, uid: &str, container: &str) -> Result<PathBuf, VolumeError> {
        let dir = self.dirs.container(uid, container)?;
        make_dirs(&dir)?;
        let file = dir.join(format!("{:08x}", fastrand::u32(..)));
        std::fs::OpenOptions::new().write(true).create_new(true).open(&file).on("create", &file)?;
        set_mode(&file, 0o666)?;
        Ok(file)
    }

    /// Brings the pod's hosts file to `content` and returns its path. The file is changed in place: running containers
    /// have it mounted.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_hosts_file(&self, uid: &str, content: &str) -> Result<PathBuf, VolumeError> {
        let file = self.dirs.pod(uid)?.join(layout::HOSTS);
        if std::fs::read(&file).is_ok_and(|held| held == content.as_bytes()) {
            return Ok(file);
        }
        std::fs::write(&file, content).on("write", &file)?;
        set_mode(&file, 0o644)?;
        Ok(file)
    }
}

fn uid_of(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    context.and_then(|context| context.fs_group).and_then(|group| u32::try_from(group).ok())
}

fn volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten())
}

/// Volumes some container mounts; others are not set up.
fn mounted_volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    volumes(pod).filter(|volume| {
        let names = |mounts: &Option<Vec<VolumeMount>>| mounts.iter().flatten().any(|mount| mount.name == volume.name);
        spec::lasting_containers(pod).any(|container| names(&container.spec.volume_mounts))
            || spec::ephemeral_containers(pod).iter().any(|container| names(&container.volume_mounts))
    })
}

/// A directory only the agent's user and group can enter; one that is there is fine.
fn make_dir(dir: &Path) -> Result<(), VolumeError> {
    match std::fs::DirBuilder::new().mode(layout::PRIVATE).create(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => make_dirs(dir),
        result => result.on("create", dir),
    }
}

fn make_dirs(dir: &Path) -> Result<(), VolumeError> {
    std::fs::DirBuilder::new().recursive(true).mode(layout::PRIVATE).create(dir).on("create", dir)
}

fn set_mode(path: &Path, mode: u32) -> Result<(), VolumeError> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).on("set the mode of", path)
}
