//! The last status of a pod: containers whose end nobody saw are given one, and the pod a terminal phase.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;

use crate::model::spec;

use super::phase;
use super::state;

/// Completes `status` for a pod whose containers and volumes are gone.
pub(super) fn complete(pod: &Pod, mut status: PodStatus) -> PodStatus {
    if is_initialised(pod) {
        status.container_statuses.iter_mut().flatten().for_each(end);
    }
    let init = status.init_container_statuses.as_deref_mut().unwrap_or_default();
    // Init containers after the last one that ever began were not lost: they never ran.
    let began = init.iter().rposition(has_begun).map_or(1, |last| last + 1);
    init.iter_mut().take(began).for_each(end);
    if !spec::is_static(pod) && !status.phase.as_deref().is_some_and(phase::is_terminal) {
        status.phase = Some("Failed".to_owned());
    }
    status
}

fn end(container: &mut ContainerStatus) {
    if state::terminated(container.state.as_ref()).is_none() {
        let message = "The container could not be located when the pod was terminated";
        container.state = Some(state::lost(state::UNKNOWN, message));
    }
}

fn has_begun(container: &ContainerStatus) -> bool {
    let waiting = container.state.as_ref().is_none_or(|state| state.waiting.is_some());
    !waiting || state::terminated(container.last_state.as_ref()).is_some()
}

/// Whether the pod got past its init containers, by what the API was told of it.
fn is_initialised(pod: &Pod) -> bool {
    let Some(last) = spec::init_containers(pod).last() else {
        return true;
    };
    let Some(told) = &pod.status else {
        return false;
    };
    let done = |status: &ContainerStatus| {
        let succeeded = |state| state::terminated(state).is_some_and(|end| end.exit_code == 0);
        if spec::is_sidecar(last) {
            let running = status.state.as_ref().is_some_and(|state| state.running.is_some());
            running && status.started == Some(true)
        } else {
            succeeded(status.state.as_ref()) || succeeded(status.last_state.as_ref())
        }
    };
    told.container_statuses.iter().flatten().any(has_begun)
        || told.init_container_statuses.iter().flatten().any(|status| status.name == last.name && done(status))
}
