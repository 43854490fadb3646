//! Prerequisites of a pod's sandbox and containers: network, cgroup, directories, volumes.

use k8s_openapi::api::core::v1::Pod;

use super::ActContext;
use super::Cause;
use super::PodError;
use super::kill;
use crate::model::PodSnapshot;
use crate::model::spec;
use crate::workers::generate::GenerateError;
use crate::workers::generate::names;
use crate::workers::generate::qos;
use crate::workers::generate::resources;

/// Creates whatever is missing; takes microseconds if nothing is.
///
/// # Errors
/// A prerequisite is missing; each such error has its event. If there is none the pod was killed, since it ran without its
/// cgroup: it is to be inspected again.
pub(super) async fn prepare(ctx: &ActContext, pod: &Pod, snapshot: &PodSnapshot) -> Result<(), Vec<PodError>> {
    let failed = |error: PodError| {
        ctx.report(pod, &error);
        vec![error]
    };
    check_network(ctx, pod).map_err(failed)?;
    if !has_cgroup(ctx, pod).map_err(failed)? {
        if runs(pod, snapshot) {
            return Err(kill::kill_pod(ctx, pod, snapshot, None).await);
        }
        create_cgroup(ctx, pod).await.map_err(failed)?;
    }
    let created = ctx.volumes.make_pod_dirs(names::pod_uid(pod));
    created.map_err(|source| failed(PodError::CreatePodDirectories { source }))?;
    super::volumes::set_up(ctx, pod).await.map_err(|error| vec![error])
}

fn check_network(ctx: &ActContext, pod: &Pod) -> Result<(), PodError> {
    let problem = ctx.network.borrow().clone().filter(|_| !spec::host_network(pod));
    problem.map_or(Ok(()), |problem| Err(PodError::NetworkNotReady { problem }))
}

/// True if the pod's cgroup exists, or pods have none on this node.
fn has_cgroup(ctx: &ActContext, pod: &Pod) -> Result<bool, PodError> {
    let Some(cgroups) = &ctx.cgroups else { return Ok(true) };
    Ok(cgroups.pod_exists(qos::qos_class(pod).map_err(invalid)?, names::pod_uid(pod)))
}

/// True if a regular container of the pod runs. Without the pod's cgroup it has no limits.
fn runs(pod: &Pod, snapshot: &PodSnapshot) -> bool {
    let is_regular = |name: &str| spec::regular_containers(pod).iter().any(|container| container.name == name);
    snapshot.running().any(|container| is_regular(&container.name))
}

async fn create_cgroup(ctx: &ActContext, pod: &Pod) -> Result<(), PodError> {
    let Some(cgroups) = &ctx.cgroups else { return Ok(()) };
    let (class, uid) = (qos::qos_class(pod).map_err(invalid)?, names::pod_uid(pod));
    let values = resources::pod_cgroup_values(pod, &ctx.settings.resources).map_err(invalid)?;
    let began = ctx.clock.now();
    let created = cgroups.ensure_pod(class, uid, &values).await;
    ctx.count(|metrics| metrics.runtime.cgroup("create", ctx.clock.now().saturating_duration_since(began)));
    created.map_err(|source| PodError::CreateCgroup { uid: uid.to_owned(), source })
}

fn invalid(source: GenerateError) -> PodError {
    PodError::InvalidSpec { source }
}

/// `cgroup_parent` of the pod's sandbox and containers; empty without QoS cgroups.
///
/// # Errors
/// The QoS class or the cgroup's name cannot be computed from the spec.
pub(super) fn cgroup_parent(ctx: &ActContext, pod: &Pod) -> Result<String, Cause> {
    let Some(cgroups) = &ctx.cgroups else { return Ok(String::new()) };
    Ok(cgroups.parent_for_runtime(qos::qos_class(pod)?, names::pod_uid(pod))?)
}
