//! The status of a pod that was rejected at admission.

use k8s_openapi::api::core::v1::PodStatus;

use super::phase;

/// Begins `status.message` of a rejected pod.
const PREFIX: &str = "Pod was rejected: ";
/// Ends the message that earlier versions of the agent gave to a pod that ran on although it was rejected.
const RUNS_ON: &str = "its containers run on unmanaged until the pod is deleted";

/// `status` with phase, reason and message of a rejection.
pub(super) fn rejected(status: PodStatus, reason: &str, message: &str) -> PodStatus {
    PodStatus {
        phase: Some("Failed".to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(format!("{PREFIX}{message}")),
        ..status
    }
}

/// The pod has failed since it was rejected.
pub(super) fn is_rejected(status: &PodStatus) -> bool {
    status.phase.as_deref() == Some("Failed") && message(status).starts_with(PREFIX)
}

/// Reason and message are about a time in which the pod ran unmanaged. A reason goes with its phase, so that they would
/// outlive that time.
pub(super) fn says_unmanaged(status: &PodStatus) -> bool {
    let has_ended = status.phase.as_deref().is_some_and(phase::is_terminal);
    !has_ended && message(status).starts_with(PREFIX) && message(status).ends_with(RUNS_ON)
}

/// `status` without such a reason and message.
pub(super) fn without_unmanaged(status: PodStatus) -> PodStatus {
    match says_unmanaged(&status) {
        true => PodStatus { reason: None, message: None, ..status },
        false => status,
    }
}

fn message(status: &PodStatus) -> &str {
    status.message.as_deref().unwrap_or_default()
}
