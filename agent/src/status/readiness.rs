//! Fields `started` and `ready` of containers: whether they run, and the results of their probes.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;

use crate::model::ContainerState;
use crate::model::PodSnapshot;
use crate::model::ProbeKind;
use crate::model::ProbeResults;
use crate::model::spec;

/// Sets both fields of all containers. Without results a container is started and ready while it runs, unless it has a probe
/// without a result yet. A container that is proven dead is neither, even while its exit code is not known yet.
pub(super) fn set_started_and_ready(
    pod: &Pod,
    snapshot: &PodSnapshot,
    probes: Option<&ProbeResults>,
    status: &mut PodStatus,
) {
    let (entries, newest) = (spec::lasting_by_name(pod), snapshot.newest_by_name());
    let entry = |container: &ContainerStatus| entries.get(container.name.as_str()).map(|entry| entry.spec);
    let permits = |container: &ContainerStatus, kind| {
        let Some((probes, newest)) = probes.zip(newest.get(container.name.as_str())) else { return true };
        let has_result = probes.of_kind(kind).contains_key(&newest.id);
        let awaits_result = || !has_result && entry(container).is_some_and(|entry| has_probe(entry, kind));
        probes.permits(kind, &newest.id) && !awaits_result()
    };
    let started = |container: &ContainerStatus| {
        let newest = newest.get(container.name.as_str());
        let is_alive = is_running(container) && newest.is_none_or(|newest| newest.state == ContainerState::Running);
        is_alive && permits(container, ProbeKind::Startup)
    };
    let ready = |container: &ContainerStatus| started(container) && permits(container, ProbeKind::Readiness);
    for container in status.container_statuses.iter_mut().flatten() {
        container.ready = ready(container);
        container.started = Some(started(container));
    }
    for container in status.init_container_statuses.iter_mut().flatten() {
        container.started = Some(started(container));
        let is_sidecar = entry(container).is_some_and(spec::is_sidecar);
        container.ready = if is_sidecar { ready(container) } else { has_succeeded(container) };
    }
}

fn has_probe(container: &Container, kind: ProbeKind) -> bool {
    match kind {
        ProbeKind::Liveness => container.liveness_probe.is_some(),
        ProbeKind::Readiness => container.readiness_probe.is_some(),
        ProbeKind::Startup => container.startup_probe.is_some(),
    }
}

fn is_running(status: &ContainerStatus) -> bool {
    status.state.as_ref().is_some_and(|state| state.running.is_some())
}

fn has_succeeded(status: &ContainerStatus) -> bool {
    let terminated = status.state.as_ref().and_then(|state| state.terminated.as_ref());
    terminated.is_some_and(|terminated| terminated.exit_code == 0)
}
