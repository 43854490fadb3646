//! Takes away what no pod needs any more: dead containers, old sandboxes, logs of pods that are gone. What goes is
//! decided by `plan`; here it is removed.
//!
//! A kubelet lists containers and sandboxes every minute for this. Here the pod's worker does it as soon as there is
//! something to remove, by the snapshot it has at hand, and only it: nobody else removes anything of its pod. Logs have no
//! worker any more; they are looked at when the house is kept.

mod plan;

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::finish;
use super::remove;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::workers::generate::names;

/// What could not be removed is tried again after this: upstream's period.
pub const PERIOD: Duration = Duration::from_secs(60);
/// Nobody knows the grace period of a container in an unknown state any more; the least that is ever given has to do.
const LEAST_GRACE: Duration = Duration::from_secs(2);

/// True if there is something for [`tidy`] to remove.
pub fn is_untidy(snapshot: &PodSnapshot) -> bool {
    let surplus: HashSet<_> = plan::surplus(snapshot).into_iter().map(|status| &status.id).collect();
    !surplus.is_empty() || !plan::old_sandboxes(snapshot, &surplus).is_empty()
}

/// Removes dead instances with their logs, and old sandboxes, of a pod that stays. Goes on after failures and returns
/// them.
pub async fn tidy(ctx: &ActContext, snapshot: &PodSnapshot) -> Vec<String> {
    let (mut failed, mut gone) = (Vec::new(), HashSet::new());
    for status in plan::surplus(snapshot) {
        match remove_surplus(ctx, status).await {
            Ok(()) => {
                gone.insert(&status.id);
            }
            Err(error) => failed.push(error),
        }
    }
    for sandbox in plan::old_sandboxes(snapshot, &gone) {
        failed.extend(remove::remove_sandbox(ctx, sandbox.as_str()).await.err());
    }
    failed
}

async fn remove_surplus(ctx: &ActContext, status: &ContainerStatus) -> Result<(), String> {
    let id = status.id.as_str();
    if status.state == ContainerState::Unknown {
        let stopped = ctx.runtime.stop_container(id, LEAST_GRACE).await;
        stopped.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error.rpc_text()) })?;
    }
    remove::remove_instance(ctx, id, Some(&status.log_path)).await
}

/// Removes all dead instances of a pod of which nothing stays, with their logs. Goes on after failures and returns them.
pub async fn remove_dead(ctx: &ActContext, snapshot: &PodSnapshot) -> Vec<String> {
    let mut failed = Vec::new();
    for status in plan::dead(snapshot) {
        failed.extend(remove::remove_instance(ctx, status.id.as_str(), Some(&status.log_path)).await.err());
    }
    failed
}

/// Removes log folders of pods whose UID is not `known`, and links to logs that are gone. A pod must be known before
/// anything of it is made. Goes on after failures and returns them.
pub async fn collect_logs(ctx: &ActContext, known: impl Fn(&str) -> bool) -> Vec<String> {
    let mut failed = Vec::new();
    for folder in log_folders(ctx, known) {
        let removing = folder.display().to_string();
        match finish::remove_tree(folder).await {
            Ok(()) => tracing::info!(folder = removing, "removed the logs of a pod that is gone"),
            Err(error) => failed.push(error),
        }
    }
    remove_dangling(ctx).await;
    failed
}

fn log_folders(ctx: &ActContext, known: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let is_gone = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let uid = name.to_str().and_then(names::uid_of_log_dir);
        uid.is_some_and(|uid| !known(uid)) && entry.file_type().is_ok_and(|kind| kind.is_dir())
    };
    let entries = fs::read_dir(&ctx.settings.pod_logs_dir).into_iter().flatten().flatten();
    entries.filter(is_gone).map(|entry| entry.path()).collect()
}

/// Removes links to logs that are gone, unless their container may still make one.
async fn remove_dangling(ctx: &ActContext) {
    let Some(links) = &ctx.files.log_links else { return };
    for entry in fs::read_dir(links).into_iter().flatten().flatten() {
        let path = entry.path();
        if !entry.file_type().is_ok_and(|kind| kind.is_symlink()) || path.exists() {
            continue;
        }
        let id = entry.file_name().to_str().and_then(names::id_of_log_link).map(str::to_owned);
        if !is_over(ctx, id.as_deref()).await {
            continue;
        }
        if let Err(error) = fs::remove_file(&path) {
            tracing::debug!(link = %path.display(), %error, "dangling link stays");
        }
    }
}

async fn is_over(ctx: &ActContext, id: Option<&str>) -> bool {
    let Some(id) = id else { return true };
    match ctx.runtime.container_status(id, false).await {
        Ok(inspection) => inspection.status.state() == cri::ContainerState::ContainerExited,
        Err(_) => true,
    }
}
