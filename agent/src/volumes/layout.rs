//! Paths of a pod's files. Pure.

use std::path::Path;
use std::path::PathBuf;

use super::VolumeError;

/// Mode of directories that belong to the agent.
pub(super) const PRIVATE: u32 = 0o750;
/// Contents of volumes.
pub(super) const VOLUMES: &str = "volumes";
/// What volume plugins remember.
pub(super) const PLUGINS: &str = "plugins";
/// Bind mounts of subPaths.
pub(super) const SUB_PATHS: &str = "volume-subpaths";
/// Links to the devices of block volumes.
pub(super) const DEVICES: &str = "volumeDevices";
/// The hosts file.
pub(super) const HOSTS: &str = "etc-hosts";
/// The plugin's name with its slash escaped.
pub(super) const EMPTY_DIR: &str = "kubernetes.io~empty-dir";

/// Where the files of pods are. Every part that comes from a spec must be a plain file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDirs {
    root: PathBuf,
}

impl PodDirs {
    /// Directories below `root`.
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The directory of all pods.
    pub fn pods(&self) -> PathBuf {
        self.root.join("pods")
    }

    /// One pod's directory.
    ///
    /// # Errors
    /// A UID that is no file name.
    pub fn pod(&self, uid: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.pods().join(plain(uid)?))
    }

    /// Where a container's termination messages are.
    ///
    /// # Errors
    /// A part that is no file name.
    pub fn container(&self, uid: &str, container: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.pod(uid)?.join("containers").join(plain(container)?))
    }

    /// The content of an emptyDir.
    ///
    /// # Errors
    /// A part that is no file name.
    pub fn empty_dir(&self, uid: &str, volume: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.pod(uid)?.join(VOLUMES).join(EMPTY_DIR).join(plain(volume)?))
    }

    /// The content of a volume of the given plugin.
    ///
    /// # Errors
    /// A part that is no file name.
    pub(super) fn volume(&self, uid: &str, plugin: &str, volume: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.pod(uid)?.join(VOLUMES).join(plugin).join(plain(volume)?))
    }

    /// The file that says an emptyDir is set up.
    ///
    /// # Errors
    /// A part that is no file name.
    pub(super) fn ready_marker(&self, uid: &str, volume: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.pod(uid)?.join(PLUGINS).join(EMPTY_DIR).join(plain(volume)?).join("ready"))
    }

    /// Where one container's subPath is mounted.
    ///
    /// # Errors
    /// A part that is no file name.
    pub(super) fn sub_path(
        &self,
        uid: &str,
        volume: &str,
        container: &str,
        index: usize,
    ) -> Result<PathBuf, VolumeError> {
        Ok(self.pod(uid)?.join(SUB_PATHS).join(plain(volume)?).join(plain(container)?).join(index.to_string()))
    }
}

/// Refuses whatever would lead to another directory.
fn plain(name: &str) -> Result<&str, VolumeError> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(VolumeError::NotAFileName { name: name.to_owned() });
    }
    Ok(name)
}
