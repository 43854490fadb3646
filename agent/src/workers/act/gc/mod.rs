//! Container garbage collection: removes exited containers, old sandboxes, and logs of pods that no longer exist. `plan`
//! decides what is removed.
//!
//! The kubelet lists containers and sandboxes every minute for this. Here the pod's worker removes what its own snapshot
//! shows, as soon as there is something to remove. What exceeds a limit on all pods is found by the pipeline, which leaves it
//! in [`DeadContainers`] for the workers. Logs of removed pods are collected by the sync loop's housekeeping.

mod dead_containers;
mod lost;
mod plan;

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

pub use dead_containers::DeadContainers;
use keblet_proto::cri::v1 as cri;

pub use plan::CountedPod;
pub use plan::excess;

use super::ActContext;
use super::Cause;
use super::PodError;
use super::kill;
use super::kill::Kill;
use super::pod_termination;
use super::remove;
use crate::filesystem;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::KillReason;
use crate::model::PodSnapshot;
use crate::runtime::Runtime;
use crate::workers::backoff;
use crate::workers::generate::names;

/// True if there is something for [`collect_garbage`] to remove.
pub fn has_garbage(ctx: &ActContext, snapshot: &PodSnapshot) -> bool {
    let surplus: HashSet<_> = surplus(ctx, snapshot).now.into_iter().map(|status| &status.id).collect();
    !surplus.is_empty() || !plan::old_sandboxes(snapshot, &surplus).is_empty()
}

/// When an instance that is too young for [`collect_garbage`] will be old enough.
pub fn next_garbage(ctx: &ActContext, snapshot: &PodSnapshot) -> Option<SystemTime> {
    surplus(ctx, snapshot).next.map(backoff::wall_time)
}

fn surplus<'a>(ctx: &ActContext, snapshot: &'a PodSnapshot) -> plan::Surplus<'a> {
    let excess = ctx.dead_containers.excess();
    let rules = plan::Rules { policy: ctx.dead_containers.policy(), excess: &excess, now: ctx.clock.wall_nanos() };
    plan::surplus(snapshot, &rules)
}

/// Removes exited instances with their logs, and old sandboxes, of a pod that stays. Continues after failures and returns
/// them.
pub async fn collect_garbage(ctx: &ActContext, snapshot: &PodSnapshot) -> Vec<PodError> {
    let (mut failed, mut gone) = (Vec::new(), HashSet::new());
    for status in surplus(ctx, snapshot).now {
        match remove_surplus(ctx, snapshot, status).await {
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

async fn remove_surplus(ctx: &ActContext, snapshot: &PodSnapshot, status: &ContainerStatus) -> Result<(), Cause> {
    if status.state == ContainerState::Unknown {
        stop_lost(ctx, snapshot, status).await?;
    }
    remove::remove_with_logs(ctx, &snapshot.pod, status).await
}

/// Stops a container in unknown state as its annotations say; if they cannot be read, with the shortest grace period.
async fn stop_lost(ctx: &ActContext, snapshot: &PodSnapshot, status: &ContainerStatus) -> Result<(), Cause> {
    let known = ctx.runtime.container_status(status.id.as_str(), false).await;
    let known = known.map(|found| found.status).unwrap_or_default();
    let pod = lost::pod_of(&status.name, &known);
    let kill = Kill {
        id: &status.id,
        name: &status.name,
        reason: KillReason::UnknownState,
        message: "",
        grace_override: None,
        ips: &snapshot.ips,
        until: kill::Until::Stopped,
    };
    kill::stop_silently(ctx, &pod, kill).await
}

/// Removes these instances of a pod whose worker has finished, with their logs. Continues after failures and returns them.
pub async fn remove_excess(ctx: &ActContext, snapshot: &PodSnapshot, excess: &HashSet<ContainerId>) -> Vec<PodError> {
    let mut failed = Vec::new();
    for status in snapshot.containers.iter().filter(|status| excess.contains(&status.id)) {
        let removed = remove_surplus(ctx, snapshot, status).await;
        failed.extend(removed.err().map(|source| PodError::CollectContainer { id: status.id.to_string(), source }));
    }
    failed
}

/// Removes the instances of a pod that is itself removed, with their logs, except those that are removed with its sandboxes.
/// Continues after failures and returns them.
pub async fn remove_dead(ctx: &ActContext, snapshot: &PodSnapshot) -> Vec<PodError> {
    let mut failed = Vec::new();
    for status in plan::dead(snapshot) {
        let removed = remove_surplus(ctx, snapshot, status).await;
        failed.extend(removed.err().map(|source| PodError::CollectContainer { id: status.id.to_string(), source }));
    }
    failed
}

/// Removes log folders of pods whose UID is not `known`. A pod must be known before its log folder is made. Continues after
/// failures and returns them.
pub async fn collect_logs(ctx: &ActContext, known: impl Fn(&str) -> bool) -> Vec<PodError> {
    let mut failed = Vec::new();
    for folder in log_folders(ctx.settings.pod_logs_dir.clone()).await {
        let uid = folder.file_name().and_then(|name| name.to_str()).and_then(names::uid_of_log_dir);
        let Some(_removal) = uid.and_then(|uid| ctx.orphans.begin(uid, &known)) else { continue };
        let removing = folder.display().to_string();
        match pod_termination::remove_tree(folder).await {
            Ok(()) => tracing::info!(folder = removing, "removed the logs of a deleted pod"),
            Err(error) => failed.push(error),
        }
    }
    failed
}

/// Log folders of all pods; none if they cannot be listed.
async fn log_folders(logs: PathBuf) -> Vec<PathBuf> {
    let listed = filesystem::blocking(move || {
        let entries = fs::read_dir(logs)?.flatten();
        let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        Ok(folders.map(|entry| entry.path()).collect())
    });
    listed.await.unwrap_or_default()
}

/// Links called `*.log` to files that do not exist, as upstream looks for them: others may have links of their own here.
/// None if they cannot be listed.
async fn dangling_links(links: PathBuf) -> Vec<PathBuf> {
    let listed = filesystem::blocking(move || {
        let is_link = |entry: &fs::DirEntry| {
            entry.file_name().as_bytes().ends_with(b".log") && entry.file_type().is_ok_and(|kind| kind.is_symlink())
        };
        // A disk that fails says nothing of its files.
        let dangles = |path: &PathBuf| path.try_exists().is_ok_and(|exists| !exists);
        Ok(fs::read_dir(links)?.flatten().filter(is_link).map(|entry| entry.path()).filter(dangles).collect())
    });
    listed.await.unwrap_or_default()
}

/// Removes links to logs that no longer exist, unless their container may still write one. What cannot be removed is only
/// logged.
pub async fn remove_dangling_links(ctx: &ActContext) {
    let Some(links) = ctx.files.log_links.clone() else { return };
    for path in dangling_links(links).await {
        let id = path.file_name().and_then(|name| name.to_str()).and_then(names::id_of_log_link);
        if !has_exited(&ctx.runtime, id).await {
            continue;
        }
        if let Err(error) = tokio::fs::remove_file(&path).await {
            tracing::debug!(link = %path.display(), %error, "cannot remove a dangling log link");
        }
    }
}

/// Makes the links to the logs of running instances that are missing: an earlier agent may have been killed right after it
/// had started them. What cannot be made is only logged.
pub async fn make_missing_links(ctx: &ActContext, pods: &[Arc<PodSnapshot>]) {
    let Some(links) = ctx.files.log_links.clone() else { return };
    let mut wanted = Vec::new();
    for pod in pods {
        for status in pod.running().filter(|status| !status.log_path.is_empty()) {
            let name = names::log_link_name(&pod.pod, &status.name, status.id.as_str());
            wanted.push((PathBuf::from(&status.log_path), links.join(name)));
        }
    }
    let make = move || {
        for (log, link) in wanted.iter().filter(|(log, link)| !link.is_symlink() && log.exists()) {
            match symlink(log, link) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    tracing::debug!(link = %link.display(), %error, "cannot link a container log");
                }
                _ => {}
            }
        }
        Ok(())
    };
    // Fails only if the agent is shutting down.
    let _ = filesystem::blocking(make).await;
}

async fn has_exited(runtime: &Runtime, id: Option<&str>) -> bool {
    let Some(id) = id else { return true };
    match runtime.container_status(id, false).await {
        Ok(inspection) => inspection.status.state() == cri::ContainerState::ContainerExited,
        Err(_) => true,
    }
}
