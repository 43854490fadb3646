//! Files of a pod that are no volumes: its directories, hosts file and termination messages.

use std::fs;
use std::path::PathBuf;

use super::VolumeError;
use super::Volumes;
use super::error::OnPath as _;
use super::layout;
use super::layout::make_dirs;
use super::layout::set_mode;
use super::plugin::blocking;
use crate::filesystem;

impl Volumes {
    /// Makes the pod's directories, as far as missing.
    ///
    /// # Errors
    /// A UID that is no file name; a directory that cannot be made.
    pub async fn make_pod_dirs(&self, uid: &str) -> Result<(), VolumeError> {
        let pod = self.dirs.pod(uid)?;
        blocking(move || layout::make_pod_dirs(&pod)).await
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
            if !filesystem::holds_exactly(&file, content.as_bytes()) {
                fs::write(&file, content).on("write", &file)?;
            }
            // They can change its mode, too, so that other users in the pod could not read it.
            set_mode(&file, 0o644)?;
            Ok(file)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::mpsc;

    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn the_agent_goes_on_while_the_disk_takes_no_directory() {
        // One thread for file calls, which is busy.
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().expect("a runtime");
        runtime.block_on(async {
            let root = tempfile::tempdir().expect("a folder");
            let volumes = Volumes::new(root.path());
            let (release, released) = mpsc::channel::<()>();
            let busy = tokio::task::spawn_blocking(move || released.recv());
            let mut making = std::pin::pin!(volumes.make_pod_dirs("u-1"));
            assert!(making.as_mut().now_or_never().is_none() && !root.path().join("pods").exists());
            drop(release);
            busy.await.expect("ended").expect_err("nothing was sent");
            making.await.expect("made");
            for dir in ["", layout::VOLUMES, layout::PLUGINS] {
                let made = fs::metadata(root.path().join("pods/u-1").join(dir)).expect("it exists");
                assert_eq!(made.permissions().mode() & 0o7777, layout::PRIVATE, "{dir}");
            }
        });
    }
}
