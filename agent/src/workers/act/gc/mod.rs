//! Container garbage collection: removes exited containers, old sandboxes, and logs of pods that no longer exist. `plan`
//! decides what is removed.
//!
//! The kubelet lists containers and sandboxes every minute for this. Here the pod's worker removes what its own snapshot
//! shows, as soon as there is something to remove. Logs of removed pods are collected by the sync loop's housekeeping.

mod plan;

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::Cause;
use super::PodError;
use super::pod_termination;
use super::remove;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::runtime::Runtime;
use crate::workers::generate::names;

/// Grace period of a container in unknown state, whose own is not known: the kubelet's minimum.
const MIN_GRACE: Duration = Duration::from_secs(2);

/// True if there is something for [`collect_garbage`] to remove.
pub fn has_garbage(snapshot: &PodSnapshot) -> bool {
    let surplus: HashSet<_> = plan::surplus(snapshot).into_iter().map(|status| &status.id).collect();
    !surplus.is_empty() || !plan::old_sandboxes(snapshot, &surplus).is_empty()
}

/// Removes exited instances with their logs, and old sandboxes, of a pod that stays. Continues after failures and returns
/// them.
pub async fn collect_garbage(ctx: &ActContext, snapshot: &PodSnapshot) -> Vec<PodError> {
    let (mut failed, mut gone) = (Vec::new(), HashSet::new());
    for status in plan::surplus(snapshot) {
        match remove_surplus(ctx, status).await {
            Ok(()) => {
                gone.insert(&status.id);
            }
            Err(source) => failed.push(PodError::CollectContainer { id: status.id.to_string(), source }),
        }
    }
    for sandbox in plan::old_sandboxes(snapshot, &gone) {
        failed.extend(remove::remove_sandbox(&ctx.runtime, sandbox).await.err());
    }
    failed
}

async fn remove_surplus(ctx: &ActContext, status: &ContainerStatus) -> Result<(), Cause> {
    let id = status.id.as_str();
    if status.state == ContainerState::Unknown {
        let stopped = ctx.runtime.stop_container(id, MIN_GRACE).await;
        stopped.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })?;
    }
    remove::remove_instance(ctx, id, Some(&status.log_path)).await
}

/// Removes all exited instances of a pod that is removed itself, with their logs. Continues after failures and returns
/// them.
pub async fn remove_dead(ctx: &ActContext, snapshot: &PodSnapshot) -> Vec<PodError> {
    let mut failed = Vec::new();
    for status in plan::dead(snapshot) {
        let removed = remove::remove_instance(ctx, status.id.as_str(), Some(&status.log_path)).await;
        failed.extend(removed.err().map(|source| PodError::CollectContainer { id: status.id.to_string(), source }));
    }
    failed
}

/// Removes log folders of pods whose UID is not `known`, and links to logs that no longer exist. A pod must be known before
/// its log folder is made. Continues after failures and returns them.
pub async fn collect_logs(ctx: &ActContext, known: impl Fn(&str) -> bool) -> Vec<PodError> {
    let mut failed = Vec::new();
    for folder in log_folders(&ctx.settings.pod_logs_dir, known) {
        let removing = folder.display().to_string();
        match pod_termination::remove_tree(folder).await {
            Ok(()) => tracing::info!(folder = removing, "removed the logs of a deleted pod"),
            Err(error) => failed.push(error),
        }
    }
    remove_dangling(ctx).await;
    failed
}

fn log_folders(logs: &Path, known: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let is_gone = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let uid = name.to_str().and_then(names::uid_of_log_dir);
        uid.is_some_and(|uid| !known(uid)) && entry.file_type().is_ok_and(|kind| kind.is_dir())
    };
    let entries = fs::read_dir(logs).into_iter().flatten().flatten();
    entries.filter(is_gone).map(|entry| entry.path()).collect()
}

/// Removes links to logs that no longer exist, unless their container may still write one.
async fn remove_dangling(ctx: &ActContext) {
    let Some(links) = &ctx.files.log_links else { return };
    for entry in fs::read_dir(links).into_iter().flatten().flatten() {
        let path = entry.path();
        if !entry.file_type().is_ok_and(|kind| kind.is_symlink()) || path.exists() {
            continue;
        }
        let id = entry.file_name().to_str().and_then(names::id_of_log_link).map(str::to_owned);
        if !has_exited(&ctx.runtime, id.as_deref()).await {
            continue;
        }
        if let Err(error) = fs::remove_file(&path) {
            tracing::debug!(link = %path.display(), %error, "cannot remove a dangling log link");
        }
    }
}

async fn has_exited(runtime: &Runtime, id: Option<&str>) -> bool {
    let Some(id) = id else { return true };
    match runtime.container_status(id, false).await {
        Ok(inspection) => inspection.status.state() == cri::ContainerState::ContainerExited,
        Err(_) => true,
    }
}
