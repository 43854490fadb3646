//! Pod termination: stops containers and sandboxes, then releases volumes and cgroup (`SyncTerminatingPod`,
//! `SyncTerminatedPod`). Exited containers, sandboxes, logs and the pod's directory stay until garbage collection.

use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use super::ActContext;
use super::PassContext;
use super::PodError;
use super::gc;
use super::kill;
use super::remove;
use crate::cgroups::Cgroups;
use crate::filesystem;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::QosClass;
use crate::pacing::StopPermit;
use crate::volumes::VolumeError;
use crate::workers::generate::ContainerSpecs;

/// How a pod is stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TerminationOptions {
    /// The effective grace period in seconds, if termination came with one.
    pub grace: Option<i64>,
    /// The termination has a deadline (eviction, node shutdown): the stop does not wait for the stop limiter.
    pub immediately: bool,
}

/// Stops all containers and sandboxes of a terminating pod (the kill of `SyncTerminatingPod`). `latest` is called when the
/// stop limiter grants a permit: containers that have exited on their own meanwhile get neither a stop nor an event. To be
/// retried until it succeeds and a snapshot sampled afterwards shows nothing running. Dropping the future abandons the stop;
/// the runtime may still complete it.
///
/// # Errors
/// The containers and sandboxes that could not be stopped.
pub async fn terminate_pod(
    ctx: &ActContext,
    pod: &Pod,
    latest: impl Fn() -> Arc<PodSnapshot>,
    options: TerminationOptions,
) -> Result<(), PodError> {
    let permit = ctx.pacing.stops.permit(options.immediately).await;
    killed(kill_with_permit(ctx, pod, &latest(), options.grace, permit).await)
}

/// Stops all containers of a terminating pod, also those that its spec does not name any more, and leaves its sandboxes to
/// [`remove_content`]. Otherwise as [`terminate_pod`].
///
/// # Errors
/// The containers that could not be stopped.
pub async fn stop_containers(
    ctx: &ActContext,
    pod: &Pod,
    latest: impl Fn() -> Arc<PodSnapshot>,
    options: TerminationOptions,
) -> Result<(), PodError> {
    let mut permit = ctx.pacing.stops.permit(options.immediately).await;
    let snapshot = latest();
    let pod = with_unnamed(pod, &snapshot);
    killed(permit.while_exiting(kill::kill_containers(ctx, &pod, &snapshot, options.grace)).await)
}

/// The pod with the running containers that its spec does not name: no sandbox is stopped that would end them.
fn with_unnamed<'a>(pod: &'a Pod, snapshot: &PodSnapshot) -> Cow<'a, Pod> {
    let specs = ContainerSpecs::of(pod);
    let is_unnamed = |status: &&ContainerStatus| !specs.contains(&status.name);
    let unnamed: Vec<Container> = snapshot.running().filter(is_unnamed).map(container_of).collect();
    let mut pod = Cow::Borrowed(pod);
    if !unnamed.is_empty() {
        pod.to_mut().spec.get_or_insert_default().containers.extend(unnamed);
    }
    pod
}

fn killed(failed: Vec<PodError>) -> Result<(), PodError> {
    if failed.is_empty() { Ok(()) } else { Err(PodError::KillPod { failed }) }
}

/// Stops a pod that only the runtime has, so without its spec: two seconds for every container, in no order.
///
/// # Errors
/// The containers and sandboxes that could not be stopped; the event of that is sent.
pub async fn kill_orphan(ctx: &ActContext, latest: impl Fn() -> Arc<PodSnapshot>) -> Result<(), PodError> {
    let permit = ctx.pacing.stops.permit(false).await;
    let snapshot = latest();
    let pod = pod_of_snapshot(&snapshot);
    let stopped = killed(kill_with_permit(ctx, &pod, &snapshot, Some(1), permit).await);
    stopped.inspect_err(|error| ctx.report(&pod, error))
}

/// Stops containers, then sandboxes. Gives the permit back while processes use their grace period.
async fn kill_with_permit(
    ctx: &ActContext,
    pod: &Pod,
    snapshot: &PodSnapshot,
    grace: Option<i64>,
    mut permit: StopPermit,
) -> Vec<PodError> {
    let mut failed = permit.while_exiting(kill::kill_containers(ctx, pod, snapshot, grace)).await;
    permit.before_teardown().await;
    failed.extend(kill::stop_sandboxes(ctx, pod, snapshot).await);
    failed
}

/// A pod spec made from the containers of a snapshot.
fn pod_of_snapshot(snapshot: &PodSnapshot) -> Pod {
    let mut pod = Pod::default();
    pod.metadata.uid = Some(snapshot.pod.uid.to_string());
    pod.metadata.name = Some(snapshot.pod.name.to_string());
    pod.metadata.namespace = Some(snapshot.pod.namespace.to_string());
    let containers = snapshot.containers.iter().map(container_of).collect();
    pod.spec = Some(k8s_openapi::api::core::v1::PodSpec { containers, ..Default::default() });
    pod
}

/// The part of a container's definition that a snapshot contains.
fn container_of(status: &ContainerStatus) -> Container {
    Container { name: status.name.clone(), image: Some(status.image.clone()), ..Container::default() }
}

/// Releases volumes, the cgroup with the processes left in it, and the range of ids of a stopped pod (`SyncTerminatedPod`). To be retried
/// until it succeeds.
///
/// # Errors
/// A volume that cannot be torn down, a cgroup that cannot be removed, a range that stays recorded.
pub async fn cleanup_pod(ctx: &ActContext, pass: &PassContext) -> Result<(), PodError> {
    release_volumes(ctx, pass.uid()).await?;
    if let Some(cgroups) = &ctx.cgroups {
        destroy_cgroup(cgroups, pass.cgroup_class()?, pass.uid()).await?;
    }
    release_user_namespace(ctx, pass.uid()).await
}

/// Gives the range of ids of a pod back, once none of its processes is left.
async fn release_user_namespace(ctx: &ActContext, uid: &str) -> Result<(), PodError> {
    let released = ctx.user_namespaces.release(uid).await;
    released.map_err(|source| PodError::ReleaseUserNamespace { uid: uid.to_owned(), source })
}

async fn destroy_cgroup(cgroups: &Cgroups, class: QosClass, uid: &str) -> Result<(), PodError> {
    let destroyed = cgroups.destroy_pod(class, uid).await;
    destroyed.map_err(|source| PodError::RemoveCgroup { uid: uid.to_owned(), source })
}

/// Releases the volumes of a stopped pod. To be retried until it succeeds.
///
/// # Errors
/// A volume that cannot be torn down.
pub async fn release_volumes(ctx: &ActContext, uid: &str) -> Result<(), PodError> {
    ctx.images.remove_cached_pod(uid);
    ctx.pulls().forget_pod(uid);
    ctx.pre_stops.forget_pod(uid);
    ctx.volumes.tear_down(uid).await.map_err(|source| tear_down_failed(uid, source))
}

fn tear_down_failed(uid: &str, source: VolumeError) -> PodError {
    PodError::TearDownVolumes { uid: uid.to_owned(), source }
}

/// Removes cgroup, volumes, range of ids and directory of a pod that is neither desired nor in the runtime.
///
/// # Errors
/// The first of them that cannot be removed.
pub async fn cleanup_orphan(ctx: &ActContext, uid: &str) -> Result<(), PodError> {
    ctx.images.remove_cached_pod(uid);
    ctx.pulls().forget_pod(uid);
    if let Some(cgroups) = &ctx.cgroups {
        let (lookup, of_pod) = (cgroups.clone(), uid.to_owned());
        let class = filesystem::blocking(move || Ok(lookup.class_of(&of_pod))).await;
        // The lookup fails only while the agent shuts down.
        if let Some(class) = class.unwrap_or_default() {
            destroy_cgroup(cgroups, class, uid).await?;
        }
    }
    ctx.volumes.tear_down(uid).await.map_err(|source| tear_down_failed(uid, source))?;
    release_user_namespace(ctx, uid).await?;
    ctx.volumes.remove_orphan(uid).await.map_err(|source| tear_down_failed(uid, source))
}

/// Removes exited containers and sandboxes of a deleted pod, with their logs, directories and cgroup. Waits for a removal
/// permit for what the runtime and the local disk do. Continues after failures and returns them.
pub async fn remove_content(ctx: &ActContext, snapshot: &PodSnapshot) -> Vec<PodError> {
    let (pod, uid) = (&snapshot.pod, snapshot.pod.uid.as_str());
    let removal = async {
        let mut failed = gc::remove_dead(ctx, snapshot).await;
        for sandbox in &snapshot.sandboxes {
            failed.extend(remove::remove_sandbox(&ctx.runtime, &sandbox.id).await.err());
        }
        let logs = ctx.settings.pod_logs_dir.join(pod.log_dir_name());
        failed.extend(remove_tree(logs).await.err());
        failed
    };
    let mut failed = ctx.pacing.removals.run(removal).await;
    // Without a permit: the server of a volume that is still mounted may take minutes to answer.
    failed.extend(cleanup_orphan(ctx, uid).await.err());
    failed
}

/// Removes a directory with its content; mount points in it stay, with what is mounted there.
///
/// # Errors
/// Something stays.
pub(super) async fn remove_tree(dir: PathBuf) -> Result<(), PodError> {
    let path = dir.clone();
    let removed = tokio::task::spawn_blocking(move || filesystem::remove_tree(&path)).await;
    let removed = removed.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    removed.map_err(|source| PodError::RemoveDirectory { directory: dir, source })
}
