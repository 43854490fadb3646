//! Takes away what no pod needs any more: dead containers, old sandboxes, logs of pods that are gone. What goes is
//! decided by `plan`; here it is listed and removed.

pub mod plan;

use std::fs;

use keblet_proto::cri::v1 as cri;

use self::plan::DeadContainer;
use self::plan::KnownSandbox;
use super::ActContext;
use super::remove;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::PodSnapshot;
use crate::runtime::RuntimeError;
use crate::workers::generate::names;

/// What one pass removed and what it could not.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct GcOutcome {
    /// Containers removed.
    pub containers: usize,
    /// Sandboxes removed.
    pub sandboxes: usize,
    /// Log directories of pods removed.
    pub log_dirs: usize,
    /// What failed.
    pub errors: Vec<String>,
}

/// One pass over the whole node, due every minute. `removable` says of a pod's UID that nothing of it need be kept; it
/// is asked only if `sources_ready`, because before that every pod looks unknown.
///
/// # Errors
/// The runtime cannot list what it has: nothing was removed.
pub async fn collect(
    ctx: &ActContext,
    sources_ready: bool,
    removable: impl Fn(&str) -> bool,
) -> Result<GcOutcome, RuntimeError> {
    let removable = |uid: &str| sources_ready && removable(uid);
    ctx.pulls().gc(ctx.clock.wall());
    let mut outcome = GcOutcome::default();
    let containers = ctx.runtime.list_containers(cri::ContainerFilter::default()).await?;
    let dead: Vec<DeadContainer> = containers.iter().filter_map(dead_container).collect();
    for container in plan::containers(&dead, &removable) {
        match remove_dead_instance(ctx, container).await {
            Ok(()) => outcome.containers += 1,
            Err(error) => outcome.errors.push(error),
        }
    }
    collect_sandboxes(ctx, &removable, &mut outcome).await?;
    collect_log_dirs(ctx, &removable, &mut outcome);
    remove_dangling(ctx).await;
    Ok(outcome)
}

/// Removes dead instances of one pod after a container of it ended: all but the newest with that container's name, or
/// all if nothing of the pod need be kept.
pub async fn remove_dead(
    ctx: &ActContext,
    snapshot: &PodSnapshot,
    exited: Option<&ContainerId>,
    keep_none: bool,
) -> Vec<String> {
    let mut failed = Vec::new();
    for status in plan::dead_of_pod(snapshot, exited, keep_none) {
        if let Err(error) = remove::remove_instance(ctx, status.id.as_str(), Some(&status.log_path)).await {
            failed.push(error);
        }
    }
    failed
}

fn dead_container(container: &cri::Container) -> Option<DeadContainer> {
    let label = |key: &str| container.labels.get(key).cloned();
    let state = match container.state() {
        cri::ContainerState::ContainerRunning => return None,
        cri::ContainerState::ContainerCreated => ContainerState::Created,
        cri::ContainerState::ContainerExited => ContainerState::Exited,
        cri::ContainerState::ContainerUnknown => ContainerState::Unknown,
    };
    // Without these labels it is not ours.
    Some(DeadContainer {
        id: container.id.as_str().into(),
        pod_uid: label(names::key::POD_UID)?,
        name: label(names::key::CONTAINER_NAME)?,
        state,
        created_at: container.created_at,
    })
}

async fn remove_dead_instance(ctx: &ActContext, container: &DeadContainer) -> Result<(), String> {
    let id = container.id.as_str();
    if container.state == ContainerState::Unknown {
        // Nobody knows its grace period any more; the runtime's floor has to do.
        let stopped = ctx.runtime.stop_container(id, std::time::Duration::from_secs(2)).await;
        stopped.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error.rpc_text()) })?;
    }
    let log_path = match ctx.runtime.container_status(id, false).await {
        Ok(inspection) => inspection.status.log_path,
        Err(error) if error.is_not_found() => return Ok(()),
        Err(error) => return Err(error.rpc_text()),
    };
    remove::remove_instance(ctx, id, Some(&log_path)).await
}

/// Sandboxes are listed before containers are: one made in between has a container that is seen, or is the newest.
async fn collect_sandboxes(
    ctx: &ActContext,
    removable: &impl Fn(&str) -> bool,
    outcome: &mut GcOutcome,
) -> Result<(), RuntimeError> {
    let sandboxes = ctx.runtime.list_pod_sandboxes(cri::PodSandboxFilter::default()).await?;
    let containers = ctx.runtime.list_containers(cri::ContainerFilter::default()).await?;
    let known: Vec<KnownSandbox> = sandboxes
        .into_iter()
        .filter_map(|sandbox| {
            let active = sandbox.state() == cri::PodSandboxState::SandboxReady
                || containers.iter().any(|container| container.pod_sandbox_id == sandbox.id);
            let uid = sandbox.labels.get(names::key::POD_UID)?.clone();
            Some(KnownSandbox { id: sandbox.id.into(), pod_uid: uid, created_at: sandbox.created_at, active })
        })
        .collect();
    for sandbox in plan::sandboxes(&known, removable) {
        let id = sandbox.id.as_str();
        let removed = match ctx.runtime.stop_pod_sandbox(id).await {
            Ok(()) => ctx.runtime.remove_pod_sandbox(id).await,
            Err(error) => Err(error),
        };
        match removed {
            Ok(()) => outcome.sandboxes += 1,
            Err(error) if error.is_not_found() => {}
            Err(error) => outcome.errors.push(error.rpc_text()),
        }
    }
    Ok(())
}

fn collect_log_dirs(ctx: &ActContext, removable: &impl Fn(&str) -> bool, outcome: &mut GcOutcome) {
    let root = &ctx.settings.pod_logs_dir;
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_gone = name.to_str().and_then(names::uid_of_log_dir).is_some_and(removable);
        if !is_gone || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        match fs::remove_dir_all(entry.path()) {
            Ok(()) => outcome.log_dirs += 1,
            Err(error) => outcome.errors.push(format!("cannot remove {}: {error}", entry.path().display())),
        }
    }
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
