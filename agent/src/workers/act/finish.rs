//! The ends of a pod's life: its processes, then its volumes and cgroup. Containers, sandboxes, logs and the pod's
//! directory stay for whoever wants to read them, until `gc` takes them.

use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::OwnedSemaphorePermit;

use super::ActContext;
use super::gc;
use super::kill;
use super::remove;
use super::report;
use super::turn::in_turn;
use crate::filesystem;
use crate::kernel::cgroup::Cgroups;
use crate::kernel::cgroup::QosClass;
use crate::model::PodSnapshot;
use crate::volumes::VolumeError;
use crate::workers::generate::names;
use crate::workers::generate::qos;

/// Stops all containers and sandboxes of a pod that ends (the kill of `SyncTerminatingPod`), as `look` shows it when its
/// turn has come: what has ended by itself meanwhile is not stopped, nor told of. Whoever brings a `turn` need not wait
/// for one. `grace_override` is the worker's effective grace period, if termination came with one. To be retried until it
/// succeeds and a snapshot sampled afterwards shows nothing running.
///
/// # Errors
/// What could not be stopped.
pub async fn terminate_pod(
    ctx: &ActContext,
    pod: &Pod,
    look: impl Fn() -> Arc<PodSnapshot>,
    grace_override: Option<i64>,
    turn: Option<OwnedSemaphorePermit>,
) -> Result<(), String> {
    let kill = async { kill::kill_pod(ctx, pod, &look(), grace_override).await };
    let failed = match turn {
        Some(_turn) => kill.await,
        None => in_turn(&ctx.stops, &ctx.recorder, kill).await,
    };
    killed(&failed)
}

/// The first half of that: stops all containers and leaves the sandboxes to [`remove_content`].
///
/// # Errors
/// What could not be stopped.
pub async fn stop_containers(
    ctx: &ActContext,
    pod: &Pod,
    look: impl Fn() -> Arc<PodSnapshot>,
    grace_override: Option<i64>,
) -> Result<(), String> {
    let kill = async { kill::kill_containers(ctx, pod, &look(), grace_override).await };
    killed(&in_turn(&ctx.stops, &ctx.recorder, kill).await)
}

fn killed(failed: &[String]) -> Result<(), String> {
    match report::aggregate(failed) {
        Some(failed) => Err(format!("error killing pod: {failed}")),
        None => Ok(()),
    }
}

/// Stops what runs of a pod that nobody desires and whose spec nobody knows: two seconds for every container, no order.
///
/// # Errors
/// What could not be stopped.
pub async fn kill_orphan(ctx: &ActContext, look: impl Fn() -> Arc<PodSnapshot>) -> Result<(), String> {
    let kill = async {
        let snapshot = look();
        kill::kill_pod(ctx, &stand_in(&snapshot), &snapshot, Some(1)).await
    };
    killed(&in_turn(&ctx.stops, &ctx.recorder, kill).await)
}

/// A pod as far as its containers tell.
fn stand_in(snapshot: &PodSnapshot) -> Pod {
    use k8s_openapi::api::core::v1::Container;
    let container = |name: &String, image: &String| Container {
        name: name.clone(),
        image: Some(image.clone()),
        ..Container::default()
    };
    let mut pod = Pod::default();
    pod.metadata.uid = Some(snapshot.pod.uid.to_string());
    pod.metadata.name = Some(snapshot.pod.name.to_string());
    pod.metadata.namespace = Some(snapshot.pod.namespace.to_string());
    let containers = snapshot.containers.iter().map(|status| container(&status.name, &status.image)).collect();
    pod.spec = Some(k8s_openapi::api::core::v1::PodSpec { containers, ..Default::default() });
    pod
}

/// Frees what a pod that has stopped still holds (`SyncTerminatedPod`): volumes first, then the cgroup with whatever is
/// left in it. To be retried until it succeeds.
///
/// # Errors
/// What could not be freed.
pub async fn cleanup_pod(ctx: &ActContext, pod: &Pod) -> Result<(), String> {
    release_volumes(ctx, pod).await?;
    let uid = names::pod_uid(pod);
    let Some(cgroups) = &ctx.cgroups else { return Ok(()) };
    let class = qos::qos_class(pod).map_err(|error| error.to_string())?;
    destroy_cgroup(ctx, cgroups, class, uid).await
}

async fn destroy_cgroup(ctx: &ActContext, cgroups: &Cgroups, class: QosClass, uid: &str) -> Result<(), String> {
    let began = ctx.clock.now();
    let destroyed = cgroups.destroy_pod(class, uid).await;
    ctx.count(|metrics| metrics.runtime.cgroup("destroy", ctx.clock.now().saturating_duration_since(began)));
    destroyed.map_err(|error| error.to_string())
}

/// Frees the volumes of a pod that has stopped, and nothing else. To be retried until it succeeds.
///
/// # Errors
/// What could not be freed.
pub async fn release_volumes(ctx: &ActContext, pod: &Pod) -> Result<(), String> {
    let uid = names::pod_uid(pod);
    ctx.images.remove_cached_pod(uid);
    ctx.pulls().forget_pod(uid, ctx.clock.wall());
    blocking(ctx, uid, |volumes, uid| volumes.tear_down(uid)).await
}

/// Frees what is left of a pod nobody knows: cgroup, volumes, directory.
///
/// # Errors
/// What could not be freed.
pub async fn cleanup_orphan(ctx: &ActContext, uid: &str) -> Result<(), String> {
    ctx.images.remove_cached_pod(uid);
    ctx.pulls().forget_pod(uid, ctx.clock.wall());
    let class = ctx.cgroups.as_ref().and_then(|cgroups| cgroups.pods().get(uid).copied());
    if let (Some(cgroups), Some(class)) = (&ctx.cgroups, class) {
        destroy_cgroup(ctx, cgroups, class, uid).await?;
    }
    blocking(ctx, uid, |volumes, uid| {
        volumes.tear_down(uid)?;
        volumes.remove_orphan(uid)
    })
    .await
}

/// Removes dead containers and sandboxes of a pod that nobody desires, with their logs, and its directories and cgroup.
/// Waits for its turn, behind all pods that are to be stopped. Goes on after failures and returns them.
pub async fn remove_content(ctx: &ActContext, snapshot: &PodSnapshot) -> Vec<String> {
    // Nobody closes them; and if somebody did, it would only be faster.
    let _turn = ctx.removals.acquire().await;
    drop(ctx.stops.acquire().await);
    let mut failed = gc::remove_dead(ctx, snapshot).await;
    for sandbox in &snapshot.sandboxes {
        failed.extend(remove::remove_sandbox(ctx, sandbox.id.as_str()).await.err());
    }
    let (pod, uid) = (&snapshot.pod, snapshot.pod.uid.as_str());
    let logs = ctx.settings.pod_logs_dir.join(format!("{}_{}_{uid}", pod.namespace, pod.name));
    failed.extend(remove_tree(logs).await.err());
    failed.extend(cleanup_orphan(ctx, uid).await.err());
    failed
}

/// Removes a directory with its content; a mount point in it stays, and what lies behind it.
///
/// # Errors
/// Something stays.
pub(super) async fn remove_tree(dir: PathBuf) -> Result<(), String> {
    let path = dir.clone();
    let removed = tokio::task::spawn_blocking(move || filesystem::remove_tree(&path)).await;
    let removed = removed.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    removed.map_err(|error| format!("cannot remove {}: {error}", dir.display()))
}

/// Deleting trees may take long: not on a thread that drives tasks.
async fn blocking(
    ctx: &ActContext,
    uid: &str,
    work: impl FnOnce(&crate::volumes::Volumes, &str) -> Result<(), VolumeError> + Send + 'static,
) -> Result<(), String> {
    let (volumes, uid) = (ctx.volumes.clone(), uid.to_owned());
    let done = tokio::task::spawn_blocking(move || work(&volumes, &uid)).await;
    done.map_err(|error| format!("tearing down volumes: {error}"))?.map_err(|error| error.to_string())
}
