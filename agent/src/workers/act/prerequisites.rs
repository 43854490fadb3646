//! Prerequisites of a pod's sandbox and containers: network, cgroup, directories, volumes.

use k8s_openapi::api::core::v1::Pod;

use super::ActContext;
use super::kill;
use crate::model::PodSnapshot;
use crate::model::spec;
use crate::recorder::EventType;
use crate::workers::generate::GenerateError;
use crate::workers::generate::names;
use crate::workers::generate::qos;
use crate::workers::generate::resources;

/// Why the prerequisites of a pod are not there.
pub(super) enum PrerequisiteError {
    /// The runtime's network is not ready: retry soon.
    Network(String),
    /// The cgroup of a running pod did not exist; the pod has been killed: inspect again.
    Killed(Vec<String>),
    /// Volumes cannot be mounted: retry with back-off, or when an object they are made from changes.
    Volumes(String),
    /// A directory or cgroup cannot be made.
    Failed(String),
}

/// Makes whatever is missing; takes microseconds if nothing is.
pub(super) async fn prepare(ctx: &ActContext, pod: &Pod, snapshot: &PodSnapshot) -> Result<(), PrerequisiteError> {
    check_network(ctx, pod)?;
    ensure_cgroup(ctx, pod, snapshot).await?;
    let uid = names::pod_uid(pod);
    ctx.volumes.make_pod_dirs(uid).map_err(|error| {
        let message = format!("error making pod data directories: {error}");
        ctx.pod_event(pod, EventType::Warning, "Failed", &message);
        PrerequisiteError::Failed(message)
    })?;
    super::volumes::set_up(ctx, pod).await.map_err(PrerequisiteError::Volumes)
}

fn check_network(ctx: &ActContext, pod: &Pod) -> Result<(), PrerequisiteError> {
    let problem = ctx.network.borrow().clone().filter(|_| !spec::host_network(pod));
    problem.map_or(Ok(()), |problem| {
        let message = format!("network is not ready: {problem}");
        ctx.pod_event(pod, EventType::Warning, "NetworkNotReady", &message);
        Err(PrerequisiteError::Network(message))
    })
}

/// Makes the pod's cgroup unless it exists. Containers that run without it have no limits: the pod is killed first and
/// inspected again.
async fn ensure_cgroup(ctx: &ActContext, pod: &Pod, snapshot: &PodSnapshot) -> Result<(), PrerequisiteError> {
    let Some(cgroups) = &ctx.cgroups else { return Ok(()) };
    let uid = names::pod_uid(pod);
    let bad_spec = |error: GenerateError| PrerequisiteError::Failed(error.to_string());
    let class = qos::qos_class(pod).map_err(bad_spec)?;
    if cgroups.pod_exists(class, uid) {
        return Ok(());
    }
    let is_regular = |name: &str| spec::regular_containers(pod).iter().any(|container| container.name == name);
    if snapshot.running().any(|container| is_regular(&container.name)) {
        return Err(PrerequisiteError::Killed(kill::kill_pod(ctx, pod, snapshot, None).await));
    }
    let values = resources::pod_cgroup_values(pod, &ctx.settings.resources).map_err(bad_spec)?;
    let began = ctx.clock.now();
    let made = cgroups.ensure_pod(class, uid, &values).await;
    ctx.count(|metrics| metrics.runtime.cgroup("create", ctx.clock.now().saturating_duration_since(began)));
    made.map_err(|error| {
        let message = format!("unable to ensure pod container exists: {error}");
        ctx.pod_event(pod, EventType::Warning, "FailedCreatePodContainer", &message);
        PrerequisiteError::Failed(format!(
            "failed to ensure that the pod: {uid} cgroups exist and are correctly applied: {error}"
        ))
    })
}

/// `cgroup_parent` of the pod's sandbox and containers; empty without QoS cgroups.
pub(super) fn cgroup_parent(ctx: &ActContext, pod: &Pod) -> Result<String, String> {
    let Some(cgroups) = &ctx.cgroups else { return Ok(String::new()) };
    let class = qos::qos_class(pod).map_err(|error| error.to_string())?;
    cgroups.parent_for_runtime(class, names::pod_uid(pod)).map_err(|error| error.to_string())
}
