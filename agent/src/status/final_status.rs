//! Final status of a terminated pod: containers of unknown state count as terminated, and the phase becomes terminal.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;

use super::phase;
use super::state;
use crate::model::spec;

/// `status` completed for a pod whose containers are stopped and volumes unmounted (upstream: `TerminatePod`).
pub(super) fn final_status(pod: &Pod, mut status: PodStatus) -> PodStatus {
    if is_initialised(pod) {
        status.container_statuses.iter_mut().flatten().for_each(set_terminated);
    }
    let init = status.init_container_statuses.as_deref_mut().unwrap_or_default();
    // Init containers after the last one that ever started never ran.
    let started = init.iter().rposition(has_started).map_or(1, |last| last + 1);
    init.iter_mut().take(started).for_each(set_terminated);
    if !spec::is_static(pod) && !status.phase.as_deref().is_some_and(phase::is_terminal) {
        status.phase = Some("Failed".to_owned());
    }
    status
}

fn set_terminated(container: &mut ContainerStatus) {
    if state::terminated(container.state.as_ref()).is_none() {
        let message = "The container could not be located when the pod was terminated";
        container.state = Some(state::lost(state::UNKNOWN, message));
    }
}

fn has_started(container: &ContainerStatus) -> bool {
    let waiting = container.state.as_ref().is_none_or(|state| state.waiting.is_some());
    !waiting || state::terminated(container.last_state.as_ref()).is_some()
}

/// True if the API object's status says that the init containers completed.
fn is_initialised(pod: &Pod) -> bool {
    let Some(last) = spec::init_containers(pod).last() else {
        return true;
    };
    let Some(reported) = &pod.status else {
        return false;
    };
    let done = |status: &ContainerStatus| {
        let succeeded = |state| state::terminated(state).is_some_and(|terminated| terminated.exit_code == 0);
        if spec::is_sidecar(last) {
            let running = status.state.as_ref().is_some_and(|state| state.running.is_some());
            running && status.started == Some(true)
        } else {
            succeeded(status.state.as_ref()) || succeeded(status.last_state.as_ref())
        }
    };
    reported.container_statuses.iter().flatten().any(has_started)
        || reported.init_container_statuses.iter().flatten().any(|status| status.name == last.name && done(status))
}
