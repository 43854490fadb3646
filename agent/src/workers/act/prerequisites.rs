//! Prerequisites of a pod's sandbox and containers: network, cgroup, directories, volumes.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use super::ActContext;
use super::Cause;
use super::PassContext;
use super::PodError;
use super::kill;
use crate::cgroups::Cgroups;
use crate::model::spec;
use crate::workers::generate::resources;

/// Creates whatever is missing; takes microseconds if nothing is. Before, waits until what an earlier pod of the same UID left is
/// removed. A pod that is `terminated` meanwhile does not wait for that, nor for its volumes: what was begun goes on, and their
/// teardown waits for it. Nor does it wait for a kill, which its termination replaces.
///
/// # Errors
/// A prerequisite is missing; each such error has its event. If there is none the pod was terminated, or killed since it ran
/// without its cgroup: it is to be inspected again.
pub(super) async fn prepare(
    ctx: &ActContext,
    pass: &PassContext,
    terminated: impl Future<Output = ()> + Send,
) -> Result<(), Vec<PodError>> {
    let pod = &pass.pod;
    let failed = |error: PodError| {
        ctx.report(pod, &error);
        vec![error]
    };
    check_network(&ctx.network, pod).map_err(failed)?;
    let mut terminated = std::pin::pin!(terminated);
    tokio::select! {
        biased;
        () = ctx.orphans.ended(pass.uid()) => {}
        () = &mut terminated => return Err(Vec::new()),
    }
    if !has_cgroup(ctx.cgroups.as_ref(), pass).map_err(failed)? {
        if runs(pass) {
            // Its termination may have a shorter grace period.
            return tokio::select! {
                biased;
                failed = kill::kill_pod(ctx, pod, &pass.snapshot) => Err(failed),
                () = terminated => Err(Vec::new()),
            };
        }
        ensure_cgroup(ctx, pass).await.map_err(failed)?;
    } else if ctx.cgroups.is_none() && !runs(pass) {
        record_pod_level(ctx, pass);
    } else if may_lack_limits(ctx.cgroups.as_ref(), pass) {
        ensure_cgroup(ctx, pass).await.map_err(failed)?;
    }
    let created = ctx.volumes.make_pod_dirs(pass.uid()).await;
    created.map_err(|source| failed(PodError::CreatePodDirectories { source }))?;
    tokio::select! {
        biased;
        done = super::volumes::set_up(ctx, pod) => done.map_err(|error| vec![error]),
        () = terminated => Err(Vec::new()),
    }
}

fn check_network(network: &watch::Receiver<Option<String>>, pod: &Pod) -> Result<(), PodError> {
    let problem = network.borrow().clone().filter(|_| !spec::host_network(pod));
    problem.map_or(Ok(()), |problem| Err(PodError::NetworkNotReady { problem }))
}

/// True if the pod's cgroup exists, or pods have none on this node.
fn has_cgroup(cgroups: Option<&Cgroups>, pass: &PassContext) -> Result<bool, PodError> {
    let Some(cgroups) = cgroups else { return Ok(true) };
    Ok(cgroups.pod_exists(pass.cgroup_class()?, pass.uid()))
}

/// True if a regular container of the pod runs. Without the pod's cgroup it has no limits.
fn runs(PassContext { pod, snapshot, .. }: &PassContext) -> bool {
    let regular: HashSet<&str> =
        spec::regular_containers(pod).iter().map(|container| container.name.as_str()).collect();
    snapshot.running().any(|container| regular.contains(container.name.as_str()))
}

/// True if the pod's cgroup may lack its limits, since the agent ended between creating and limiting it, or systemd did not take
/// them. Once a container runs only a resize changes them.
fn may_lack_limits(cgroups: Option<&Cgroups>, pass: &PassContext) -> bool {
    cgroups.is_some_and(|cgroups| !cgroups.has_limited(pass.uid())) && pass.snapshot.running().next().is_none()
}

/// Creates the pod's cgroup where it is missing, and limits it.
async fn ensure_cgroup(ctx: &ActContext, pass: &PassContext) -> Result<(), PodError> {
    let Some(cgroups) = &ctx.cgroups else { return Ok(()) };
    let (class, uid) = (pass.cgroup_class()?, pass.uid());
    let values = resources::pod_cgroup_values(&pass.pod, &ctx.settings.resources)
        .map_err(|source| PodError::InvalidSpec { source })?;
    let ensured = cgroups.ensure_pod(class, uid, &values).await;
    ensured.map_err(|source| PodError::CreateCgroup { uid: uid.to_owned(), source })?;
    record_pod_level(ctx, pass);
    Ok(())
}

/// Records that the pod is started with its `spec.resources`.
fn record_pod_level(ctx: &ActContext, pass: &PassContext) {
    let pod_level = pass.pod.spec.as_ref().and_then(|spec| spec.resources.clone());
    ctx.allocations.pod_actuated(&pass.pod_ref.uid, pod_level);
}

/// `cgroup_parent` of the pod's sandbox and containers; empty without QoS cgroups.
///
/// # Errors
/// The QoS class or the cgroup's name cannot be computed from the spec.
pub(super) fn cgroup_parent(cgroups: Option<&Cgroups>, pass: &PassContext) -> Result<String, Cause> {
    let Some(cgroups) = cgroups else { return Ok(String::new()) };
    Ok(cgroups.parent_for_runtime(pass.qos_class.clone()?, pass.uid())?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::testing;
    use crate::workers::act::TerminationOptions;

    /// Containers: as many as an object of the API server has room for.
    #[test]
    fn of_thousands_of_containers_only_regular_ones_count_as_running() {
        let names = |prefix: &str| (0..15_000).map(|number| format!("{prefix}{number}")).collect::<Vec<_>>();
        let (sidecars, regular) = (names("side"), names("main"));
        let [init, main] = [&sidecars, &regular].map(|names| names.iter().map(String::as_str).collect::<Vec<_>>());
        let pod = Arc::new(testing::pod("Always", &init, &main));
        let runs_with = |last: &str| {
            let running = sidecars.iter().map(String::as_str).chain([last]);
            let snapshot = testing::snapshot(running.map(|name| testing::running(name, 0)).collect());
            runs(&PassContext::new(
                snapshot.pod.clone(),
                pod.clone(),
                Arc::new(snapshot),
                TerminationOptions::default(),
            ))
        };
        assert_eq!((runs_with("other"), runs_with("main7")), (false, true));
    }
}
