//! Suspends the processes of a pod for a while, through the freezer of `cgroups-rs`. Only with cgroup v2: the freezer of v1
//! is a hierarchy of its own, in which pods need not have a cgroup.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use cgroups_rs::FreezerState;
use cgroups_rs::fs::error::Result as FsResult;
use cgroups_rs::fs::freezer::FreezerController;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::CgroupError;
use super::CgroupName;
use super::Cgroups;
use super::Driver;
use super::Layout;
use super::files;
use super::layout::below;
use super::limits::named;
use super::signals;
use crate::model::QosClass;

/// Period at which the pending signals of suspended processes are read, for a few seconds at most.
const SIGNAL_POLL: Duration = Duration::from_millis(20);
/// Number of suspended processes of a cgroup whose pending signals are read in each period: on a stalled node this may not
/// take long. The first process of a container, which is the one to get the signal, is listed first.
const MAX_CHECKED: usize = 1024;
/// How long the end of the agent waits for suspensions that the kernel is slow to carry out. Pod workers may have taken five
/// seconds before, and the process has ten in all.
const SUSPENSIONS_END: Duration = Duration::from_secs(2);

/// Suspensions in progress.
#[derive(Clone, Debug, Default)]
pub(super) struct Suspensions {
    tasks: TaskTracker,
    /// Cancelled when the agent ends: no pod is suspended from then on, and suspended ones are resumed.
    ending: CancellationToken,
}

impl Cgroups {
    /// Suspends the pod's processes, and resumes them as soon as one of them has a pending signal that may be its stop
    /// signal, after `longest` at the latest. Both are done in a task of its own: on a stalled node the kernel may take long
    /// for the first, and the second must follow whatever becomes of the caller. SIGKILL ends suspended processes, other
    /// signals arrive when they are resumed. Does nothing with cgroup v1. Failures are logged.
    pub fn suspend_pod(&self, class: QosClass, uid: &str, longest: Duration) {
        if !self.layout().is_v2() {
            return;
        }
        // A UID that cannot name a cgroup has none.
        if let Ok(path) = self.parent_for_runtime(class, uid) {
            self.suspensions.tasks.spawn(self.clone().suspend(path, longest));
        }
    }

    async fn suspend(self, path: String, longest: Duration) {
        let ending = &self.suspensions.ending;
        // What begins now is not waited for, and would stay suspended.
        if ending.is_cancelled() {
            return;
        }
        let end = Instant::now() + longest;
        let freeze = |layout: &Layout, path: &str| set(layout, path, "the suspension", FreezerController::freeze);
        if let Err(error) = self.blocking(&path, freeze).await {
            return tracing::warn!(%error, "cannot suspend the processes of a pod");
        }
        // Late or not, they are resumed.
        let _ = tokio::time::timeout_at(end, ending.run_until_cancelled(self.until_signalled(&path))).await;
        // The processes may have ended meanwhile, and their cgroup with them.
        if let Err(error) = self.blocking(&path, resume).await {
            tracing::debug!(%error, "the processes of a pod are not resumed");
        }
    }

    /// Completes when a process in the cgroup has a pending signal that may be its stop signal.
    async fn until_signalled(&self, path: &str) {
        let is_signalled = |layout: &Layout, path: &str| Ok(is_any(layout, path, signals::may_be_stopping));
        while !self.blocking(path, is_signalled).await.unwrap_or(false) {
            tokio::time::sleep(SIGNAL_POLL).await;
        }
    }

    /// Resumes all pods below `root` (`cgroupRoot`) that are suspended, with either driver: which one is in use is not known
    /// until the runtime responds, and suspended pods must not wait for that. Failures are logged.
    pub async fn resume_pods_of_any_driver(layout: &Layout, root: &CgroupName) {
        for driver in [Driver::Cgroupfs, Driver::Systemd] {
            // The freezer needs files alone, not systemd.
            Self::with(layout.clone(), driver, root.clone(), None).resume_pods().await;
        }
    }

    /// Resumes all pods that are suspended, and suspends none any more: an agent may end before it has resumed one. Waits for
    /// suspensions in progress, for a bounded time. Failures are logged.
    pub async fn resume_pods(&self) {
        if !self.layout().is_v2() {
            return;
        }
        let Suspensions { tasks, ending } = &self.suspensions;
        ending.cancel();
        tasks.close();
        if tokio::time::timeout(SUSPENSIONS_END, tasks.wait()).await.is_err() {
            tracing::warn!("a pod may stay suspended until an agent starts: the kernel is slow to suspend it");
        }
        let cgroups = self.clone();
        let resume_all = move |layout: &Layout, _: &str| {
            let pods = cgroups.pods().into_iter();
            let paths = pods.filter_map(|(uid, class)| cgroups.parent_for_runtime(class, &uid).ok());
            for path in paths.filter(|path| is_suspended(layout, path)) {
                match resume(layout, &path) {
                    Ok(()) => tracing::info!(cgroup = path, "resumed a suspended pod"),
                    Err(error) => tracing::warn!(%error, "cannot resume a suspended pod"),
                }
            }
            Ok(())
        };
        if let Err(error) = self.blocking(&self.kubepods_path(), resume_all).await {
            tracing::warn!(%error, "cannot list suspended pods");
        }
    }
}

/// One of the first processes of the cgroup, or of one below it, is such a one.
pub(super) fn is_any(layout: &Layout, path: &str, is_one: impl FnMut(i32) -> bool) -> bool {
    files::listed_pids(layout, path, MAX_CHECKED).any(is_one)
}

fn resume(layout: &Layout, path: &str) -> Result<(), CgroupError> {
    set(layout, path, "the end of the suspension", FreezerController::thaw)
}

fn set(
    layout: &Layout,
    path: &str,
    what: &'static str,
    change: fn(&FreezerController) -> FsResult<()>,
) -> Result<(), CgroupError> {
    let Layout::V2 { mount } = layout else { return Ok(()) };
    let folder = below(mount, path);
    named(&folder, what, change(&freezer(&folder)))
}

fn is_suspended(layout: &Layout, path: &str) -> bool {
    let Layout::V2 { mount } = layout else { return false };
    matches!(freezer(&below(mount, path)).state(), Ok(FreezerState::Frozen))
}

/// The freezer of a cgroup of v2.
fn freezer(folder: &Path) -> FreezerController {
    FreezerController::new(folder.to_owned(), PathBuf::new(), true)
}
