//! Status of a pod that the agent terminates (graceful node shutdown, eviction): reason, message and `DisruptionTarget`.

use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;

use super::conditions::DISRUPTION_TARGET;
use super::conditions::TERMINATION_BY_KUBELET;

/// Why the agent terminates a pod. A pod that has already succeeded keeps its phase; any other becomes `Failed`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TerminationReason {
    /// For `status.reason`.
    pub reason: &'static str,
    /// For `status.message`.
    pub message: String,
    /// Message of the condition `DisruptionTarget` (KEP-3329); `None` if the pod itself is at fault.
    pub disruption: Option<String>,
}

/// `status` with phase, reason, message and condition of this termination.
pub(super) fn with_termination_reason(
    mut status: PodStatus,
    termination: &TerminationReason,
    generation: Option<i64>,
) -> PodStatus {
    if status.phase.as_deref() != Some("Succeeded") {
        status.phase = Some("Failed".to_owned());
    }
    status.reason = Some(termination.reason.to_owned());
    status.message = Some(termination.message.clone());
    if let Some(message) = &termination.disruption {
        let conditions = status.conditions.get_or_insert_default();
        let since =
            conditions.iter().find(|c| c.type_ == DISRUPTION_TARGET).and_then(|c| c.last_transition_time.clone());
        conditions.retain(|condition| condition.type_ != DISRUPTION_TARGET);
        conditions.push(PodCondition {
            type_: DISRUPTION_TARGET.to_owned(),
            status: "True".to_owned(),
            reason: Some(TERMINATION_BY_KUBELET.to_owned()),
            message: Some(message.clone()),
            last_transition_time: since,
            observed_generation: generation,
            ..PodCondition::default()
        });
    }
    status
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(value: serde_json::Value) -> PodStatus {
        serde_json::from_value(value).expect("a status")
    }

    #[test]
    fn sets_reason_message_and_condition() {
        let termination =
            TerminationReason { reason: "Terminated", message: "m".to_owned(), disruption: Some("d".to_owned()) };
        let terminated = with_termination_reason(status(json!({ "phase": "Running" })), &termination, Some(3));
        let expected = json!({
            "phase": "Failed",
            "reason": "Terminated",
            "message": "m",
            "conditions": [{
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "TerminationByKubelet",
                "message": "d",
                "observedGeneration": 3,
            }],
        });
        assert_eq!(terminated, status(expected));
        assert_eq!(with_termination_reason(terminated.clone(), &termination, Some(3)), terminated, "idempotent");
    }

    #[test]
    fn a_succeeded_pod_keeps_its_phase() {
        let termination = TerminationReason { reason: "Terminated", message: "m".to_owned(), disruption: None };
        let terminated = with_termination_reason(status(json!({ "phase": "Succeeded" })), &termination, None);
        assert_eq!(terminated, status(json!({ "phase": "Succeeded", "reason": "Terminated", "message": "m" })));
    }
}
