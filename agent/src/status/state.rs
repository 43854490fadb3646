//! Conversion of container states from the runtime to the API.

use k8s_openapi::api::core::v1::ContainerState as ApiState;
use k8s_openapi::api::core::v1::ContainerStateRunning;
use k8s_openapi::api::core::v1::ContainerStateTerminated;
use k8s_openapi::api::core::v1::ContainerStateWaiting;

use super::time;
use crate::model::ContainerState;
use crate::model::ContainerStatus;

/// Reason of a container whose main process was killed by the OOM killer.
const OOM_KILLED: &str = "OOMKilled";
/// Reason of a container whose termination was not observed.
pub(super) const UNKNOWN: &str = "ContainerStatusUnknown";

/// The API state of an instance; `None` if it is dead and its exit code is not known yet.
pub(super) fn of_instance(instance: &ContainerStatus, runtime_type: &str) -> Option<ApiState> {
    match instance.state {
        ContainerState::Running => Some(running(instance)),
        ContainerState::Exited if instance.start_was_cancelled() => Some(waiting("", "")),
        ContainerState::Exited => Some(exited(instance, instance.exit_code?, id(instance, runtime_type))),
        ContainerState::Created | ContainerState::Unknown => Some(waiting("", "")),
    }
}

/// `state` with the reason that an earlier process of the agent reported for the same exit, if one of the two is an OOM
/// kill: that process had the kernel's evidence, this one has only the runtime's report.
pub(super) fn with_former_reason(
    mut state: ApiState,
    instance: &ContainerStatus,
    former: Option<&ApiState>,
) -> ApiState {
    let (Some(new), Some(former)) = (state.terminated.as_mut(), terminated(former)) else { return state };
    let is_ordinary = |reason: Option<&str>| matches!(reason, Some("Completed" | "Error"));
    let (old, now) = (former.reason.as_deref(), new.reason.as_deref());
    let differs_in_oom = (old == Some(OOM_KILLED) && is_ordinary(now)) || (is_ordinary(old) && now == Some(OOM_KILLED));
    if differs_in_oom && !instance.exit_observed && instance.proven.is_none() && former.container_id == new.container_id
    {
        new.reason.clone_from(&former.reason);
    }
    state
}

/// Running since the instance was started.
pub(super) fn running(instance: &ContainerStatus) -> ApiState {
    let started_at = Some(time::of_nanos(instance.started_at));
    ApiState { running: Some(ContainerStateRunning { started_at }), ..ApiState::default() }
}

/// Waiting; empty texts are left out.
pub(super) fn waiting(reason: &str, message: &str) -> ApiState {
    let waiting = ContainerStateWaiting { reason: given(reason), message: given(message) };
    ApiState { waiting: Some(waiting), ..ApiState::default() }
}

/// Terminated without being observed.
pub(super) fn lost(reason: &str, message: &str) -> ApiState {
    let terminated = ContainerStateTerminated {
        exit_code: 137,
        reason: given(reason),
        message: given(message),
        ..ContainerStateTerminated::default()
    };
    ApiState { terminated: Some(terminated), ..ApiState::default() }
}

/// The terminated part of a state.
pub(super) fn terminated(state: Option<&ApiState>) -> Option<&ContainerStateTerminated> {
    state.and_then(|state| state.terminated.as_ref())
}

/// The API's spelling of a container id.
pub(super) fn id(instance: &ContainerStatus, runtime_type: &str) -> String {
    format!("{runtime_type}://{}", instance.id)
}

fn exited(instance: &ContainerStatus, exit_code: i32, id: String) -> ApiState {
    let terminated = ContainerStateTerminated {
        container_id: Some(id),
        exit_code,
        reason: given(reason(instance, exit_code)),
        message: given(&instance.message),
        started_at: Some(time::of_nanos(instance.started_at)),
        finished_at: Some(time::of_nanos(instance.finished_at)),
        signal: None,
    };
    ApiState { terminated: Some(terminated), ..ApiState::default() }
}

/// The runtime's reason verbatim. Until it reports an exit that the kernel has reported with its code, the reason it will
/// most likely give.
fn reason(instance: &ContainerStatus, exit_code: i32) -> &str {
    match instance.proven {
        Some(proven) if proven.oom_killed => OOM_KILLED,
        Some(_) if instance.reason.is_empty() && exit_code == 0 => "Completed",
        Some(_) if instance.reason.is_empty() => "Error",
        _ => &instance.reason,
    }
}

fn given(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}
