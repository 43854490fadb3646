//! Files of a pod that are no volumes: its directories, hosts file and termination messages.

use std::fs;
use std::path::PathBuf;

use super::VolumeError;
use super::Volumes;
use super::error::OnPath as _;
use super::layout;
use super::layout::make_dir;
use super::layout::make_dirs;
use super::layout::set_mode;
use super::plugin::blocking;
use crate::filesystem;

impl Volumes {
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

    /// Makes an empty file for a container's termination message and returns its path. One per attempt; it stays until
    /// the pod's directory goes.
    ///
    /// # Errors
    /// The file cannot be made.
    pub async fn make_termination_file(&self, uid: &str, container: &str) -> Result<PathBuf, VolumeError> {
        let dir = self.dirs.container(uid, container)?;
        blocking(move || {
            make_dirs(&dir)?;
            let file = dir.join(format!("{:08x}", fastrand::u32(..)));
            fs::OpenOptions::new().write(true).create_new(true).open(&file).on("create", &file)?;
            set_mode(&file, 0o666)?;
            Ok(file)
        })
        .await
    }

    /// Brings the pod's hosts file to `content` and returns its path. The file is changed in place: running containers
    /// have it mounted.
    ///
    /// # Errors
    /// The file cannot be written.
    pub async fn write_hosts_file(&self, uid: &str, content: String) -> Result<PathBuf, VolumeError> {
        let file = self.dirs.pod(uid)?.join(layout::HOSTS);
        blocking(move || {
            // Containers can write the file: it may have any length.
            if filesystem::holds_exactly(&file, content.as_bytes()) {
                return Ok(file);
            }
            fs::write(&file, content).on("write", &file)?;
            set_mode(&file, 0o644)?;
            Ok(file)
        })
        .await
    }
}
