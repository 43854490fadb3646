//! Suspends the processes of a pod for a while, through the freezer of `cgroups-rs`. Only with cgroup v2: the freezer of v1 is a
//! hierarchy of its own, in which pods need not have a cgroup.

use std::path::PathBuf;
use std::time::Duration;

use cgroups_rs::fs::error::Result as FsResult;
use cgroups_rs::fs::freezer::FreezerController;

use super::CgroupError;
use super::Cgroups;
use super::Layout;
use super::layout::below;
use super::limits::named;
use crate::model::QosClass;

impl Cgroups {
    /// Suspends the pod's processes, and resumes them after `duration` in a task of its own, whatever becomes of the caller.
    /// SIGKILL ends suspended processes, other signals arrive when they are resumed. Does nothing with cgroup v1.
    ///
    /// # Errors
    /// The pod has no cgroup, or the kernel refuses.
    pub async fn suspend_pod(&self, class: QosClass, uid: &str, duration: Duration) -> Result<(), CgroupError> {
        let path = self.root.pod(class, uid)?.path(self.driver);
        let is_suspended =
            self.blocking(&path, |layout, path| set(layout, path, "the suspension", FreezerController::freeze)).await?;
        if is_suspended {
            tokio::spawn(self.clone().resume_after(path, duration));
        }
        Ok(())
    }

    async fn resume_after(self, path: String, duration: Duration) {
        tokio::time::sleep(duration).await;
        let thaw =
            |layout: &Layout, path: &str| set(layout, path, "the end of the suspension", FreezerController::thaw);
        // The processes may have ended meanwhile, and their cgroup with them.
        if let Err(error) = self.blocking(&path, thaw).await {
            tracing::debug!(%error, "the processes of a pod are not resumed");
        }
    }
}

/// Returns false with cgroup v1.
fn set(
    layout: &Layout,
    path: &str,
    what: &'static str,
    change: fn(&FreezerController) -> FsResult<()>,
) -> Result<bool, CgroupError> {
    let Layout::V2 { mount } = layout else { return Ok(false) };
    let folder = below(mount, path);
    let changed = change(&FreezerController::new(folder.clone(), PathBuf::new(), true));
    named(&folder, what, changed).map(|()| true)
}
