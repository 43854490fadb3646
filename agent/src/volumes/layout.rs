//! Paths and modes of a pod's files.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::path::PathBuf;

use super::VolumeError;
use super::error::OnPath as _;

/// Mode of directories that belong to the agent.
pub(super) const PRIVATE: u32 = 0o750;
/// Contents of volumes.
pub(super) const VOLUMES: &str = "volumes";
/// State of volume plugins.
pub(super) const PLUGINS: &str = "plugins";
/// Bind mounts of subPaths.
pub(super) const SUB_PATHS: &str = "volume-subpaths";
/// Links to the devices of block volumes.
pub(super) const DEVICES: &str = "volumeDevices";
/// The hosts file.
pub(super) const HOSTS: &str = "etc-hosts";
/// Name of the emptyDir plugin; its directories also hold the markers of volumes that are made from API objects.
pub(super) const EMPTY_DIR: &str = "kubernetes.io/empty-dir";

/// Name of a plugin's directories.
pub(super) fn escaped(plugin: &str) -> String {
    plugin.replace('/', "~")
}

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

    /// The content of a volume; `plugin` is its plugin's directory.
    ///
    /// # Errors
    /// A part that is no file name.
    pub(super) fn volume(&self, uid: &str, plugin: &str, volume: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.pod(uid)?.join(VOLUMES).join(plugin).join(plain(volume)?))
    }

    /// The links to the devices of a pod's block volumes; `plugin` is their plugin's directory.
    ///
    /// # Errors
    /// A UID that is no file name.
    pub(super) fn devices(&self, uid: &str, plugin: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.pod(uid)?.join(DEVICES).join(plugin))
    }

    /// The link to the device of one block volume.
    ///
    /// # Errors
    /// A part that is no file name.
    pub(super) fn device(&self, uid: &str, plugin: &str, volume: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.devices(uid, plugin)?.join(plain(volume)?))
    }

    /// Where the device of a block volume is bind mounted for a pod.
    ///
    /// # Errors
    /// A part that is no file name.
    pub(super) fn device_map(&self, plugin: &str, volume: &str, uid: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.root.join(PLUGINS).join(plugin).join(DEVICES).join(plain(volume)?).join(plain(uid)?))
    }

    /// A path in a pod's directory as events name it: from the pod's UID on, as upstream.
    pub(super) fn shown<'a>(&self, path: &'a Path) -> &'a Path {
        path.strip_prefix(self.pods()).unwrap_or(path)
    }

    /// What a volume plugin keeps for the node; `plugin` is its directory.
    pub(super) fn plugin(&self, plugin: &str) -> PathBuf {
        self.root.join(PLUGINS).join(plugin)
    }

    /// The file that marks an emptyDir as set up.
    ///
    /// # Errors
    /// A part that is no file name.
    pub(super) fn ready_marker(&self, uid: &str, volume: &str) -> Result<PathBuf, VolumeError> {
        Ok(self.pod(uid)?.join(PLUGINS).join(escaped(EMPTY_DIR)).join(plain(volume)?).join("ready"))
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

/// Refuses names that lead to another directory.
fn plain(name: &str) -> Result<&str, VolumeError> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(VolumeError::NotAFileName { name: name.to_owned() });
    }
    Ok(name)
}

/// The path as the kernel names it: the way to it is the operator's and may have links. What it leads to is not touched: it
/// may be a mount whose server does not answer.
pub(super) fn resolved(path: &Path) -> PathBuf {
    let dir = path.parent().and_then(|dir| dir.canonicalize().ok());
    dir.zip(path.file_name()).map_or_else(|| path.to_owned(), |(dir, name)| dir.join(name))
}

/// What is in a directory; nothing if there is none.
///
/// # Errors
/// It cannot be listed to its end: the caller would take a part of it for all that is in use.
pub(super) fn entries(dir: &Path) -> Result<Vec<PathBuf>, VolumeError> {
    let paths = |list: fs::ReadDir| list.map(|entry| entry.map(|entry| entry.path())).collect();
    let listed: io::Result<Vec<PathBuf>> = fs::read_dir(dir).and_then(paths);
    match listed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed.on("list", dir),
    }
}

/// Makes the directory of a pod and those in it, as far as missing.
pub(super) fn make_pod_dirs(pod: &Path) -> Result<(), VolumeError> {
    [pod, &pod.join(VOLUMES), &pod.join(PLUGINS)].into_iter().try_for_each(make_dir)
}

/// Makes a directory that only the agent's user and group can enter, unless it exists.
fn make_dir(dir: &Path) -> Result<(), VolumeError> {
    match fs::DirBuilder::new().mode(PRIVATE).create(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => make_dirs(dir),
        result => result.on("create", dir),
    }
}

/// As [`make_dir`], with the directories above it.
pub(super) fn make_dirs(dir: &Path) -> Result<(), VolumeError> {
    fs::DirBuilder::new().recursive(true).mode(PRIVATE).create(dir).on("create", dir)
}

pub(super) fn set_mode(path: &Path, mode: u32) -> Result<(), VolumeError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).on("set the mode of", path)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sys::wait::Id;
    use nix::sys::wait::WaitPidFlag;
    use nix::sys::wait::waitid;
    use nix::unistd::Pid;

    use super::*;

    #[test]
    fn a_list_that_fails_after_the_directory_was_opened_is_no_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), "").unwrap();
        assert_eq!(entries(dir.path()).unwrap(), [dir.path().join("a")]);
        assert!(entries(&dir.path().join("none")).unwrap().is_empty());
        // An ended process has no network any more; its directory of that can be opened, and not be read.
        let mut ended = Command::new("true").spawn().unwrap();
        let pid = ended.id();
        let id = Id::Pid(Pid::from_raw(pid.try_into().unwrap()));
        waitid(id, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT).unwrap();
        let network = PathBuf::from(format!("/proc/{pid}/net"));
        let opened = fs::read_dir(&network).map(drop);
        let listed = entries(&network);
        ended.wait().unwrap();
        opened.unwrap();
        assert!(matches!(listed, Err(VolumeError::Io { verb: "list", .. })), "{listed:?}");
    }
}
