//! The mount of a volume for one pod.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::Driver;
use super::FlexError;
use super::reply::Answer;
use crate::recorder::EventType;
use crate::volumes::PodDirs;
use crate::volumes::VolumeError;
use crate::volumes::actual_state::ActualState;
use crate::volumes::bind_mount;
use crate::volumes::error::OnPath as _;
use crate::volumes::fs_group;
use crate::volumes::fs_group::ChangePolicy;
use crate::volumes::layout::make_dirs;
use crate::volumes::plugin::blocking;

/// A volume that is about to be mounted for a pod.
pub(super) struct PodMount {
    pub(super) driver: Arc<Driver>,
    /// The pod's directory of the volume.
    pub(super) dir: PathBuf,
    /// Where it is mounted for the node, by a driver that attaches.
    pub(super) place: PathBuf,
    /// With the values of the Secret.
    pub(super) options: String,
    pub(super) read_only: bool,
    /// The pod's `fsGroup`.
    pub(super) group: Option<u32>,
    pub(super) dirs: PodDirs,
    pub(super) pod: Pod,
    pub(super) actual: ActualState,
}

impl PodMount {
    /// Has the driver mount it, unless it is, and gives its files to the pod's group.
    ///
    /// # Errors
    /// The driver, or the mount that it leaves to the agent, fails: nothing is left then.
    pub(super) async fn run(&self) -> Result<(), VolumeError> {
        // What was begun before may have ended while this waited.
        if bind_mount::is_there(&self.dir).await? {
            return Ok(());
        }
        let dir = self.dir.clone();
        blocking(move || make_dirs(&dir)).await?;
        if let Err(error) = self.mount().await {
            let dir = self.dir.clone();
            // Stays if something was mounted all the same: the next attempt uses it.
            let _ = blocking(move || fs::remove_dir(&dir).on("remove", &dir)).await;
            return Err(error);
        }
        self.give().await;
        Ok(())
    }

    async fn mount(&self) -> Result<(), VolumeError> {
        let answer = self.driver.call("mount", &[&*self.dir.to_string_lossy()], &[&self.options]).await?;
        if answer != Answer::NotSupported {
            return Ok(());
        }
        // Otherwise it is at most a directory of the node's own file system.
        if !bind_mount::is_there(&self.place).await? {
            return Err(FlexError::NothingMounted { place: self.place.clone() }.into());
        }
        bind_mount::make(&self.place, &self.dir, self.read_only).await
    }

    /// Gives the files of a volume that may be written to the pod's group, unless the driver does. As upstream, the pod
    /// starts even if that fails.
    async fn give(&self) {
        let Some(group) = self.group.filter(|_| self.driver.capabilities.fs_group && !self.read_only) else { return };
        let policy = ChangePolicy::of_pod(&self.pod);
        // A kubelet records this event for local volumes alone.
        let log = |_: EventType, _: &str, message: &str| tracing::warn!("{message}");
        let given = fs_group::give(&self.dir, group, policy, self.dirs.shown(&self.dir), log);
        if let Err(error) = self.actual.timed(fs_group::OPERATION, self.driver.name, given).await {
            tracing::warn!(volume = %self.dir.display(), %error, "not all files of the volume are the group's");
        }
    }
}
