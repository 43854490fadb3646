//! The status of a pod that the agent ends against its will: why, for everybody to see.

use std::time::SystemTime;

use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;

use super::conditions::DISRUPTION_TARGET;

/// What is said of such a pod. It keeps what it was if it has succeeded already; else it has failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ending {
    /// For `status.reason`.
    pub reason: &'static str,
    /// For `status.message`.
    pub message: String,
    /// Message of the condition `DisruptionTarget`, for ends that are nobody's fault (KEP-3329).
    pub disruption: Option<String>,
}

/// `status` with the words of `ending`.
pub(super) fn ended(mut status: PodStatus, ending: &Ending, generation: Option<i64>) -> PodStatus {
    if status.phase.as_deref() != Some("Succeeded") {
        status.phase = Some("Failed".to_owned());
    }
    status.reason = Some(ending.reason.to_owned());
    status.message = Some(ending.message.clone());
    if let Some(message) = &ending.disruption {
        let conditions = status.conditions.get_or_insert_default();
        let since =
            conditions.iter().find(|c| c.type_ == DISRUPTION_TARGET).and_then(|c| c.last_transition_time.clone());
        conditions.retain(|condition| condition.type_ != DISRUPTION_TARGET);
        conditions.push(PodCondition {
            type_: DISRUPTION_TARGET.to_owned(),
            status: "True".to_owned(),
            reason: Some("TerminationByKubelet".to_owned()),
            message: Some(message.clone()),
            last_transition_time: since,
            observed_generation: generation,
            ..PodCondition::default()
        });
    }
    status
}

impl super::Statuses {
    /// The pod is being ended against its will: says why. To be called once something was published of it.
    pub fn end(&self, pod: &k8s_openapi::api::core::v1::Pod, ending: &Ending, now: SystemTime) {
        self.amend(pod, |status| ended(status, ending, pod.metadata.generation), now);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(value: serde_json::Value) -> PodStatus {
        serde_json::from_value(value).expect("a status")
    }

    #[test]
    fn says_why() {
        let ending = Ending { reason: "Terminated", message: "m".to_owned(), disruption: Some("d".to_owned()) };
        let ended_now = ended(status(json!({ "phase": "Running" })), &ending, Some(3));
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
        assert_eq!(ended_now, status(expected));
        assert_eq!(ended(ended_now.clone(), &ending, Some(3)), ended_now, "said twice is said once");
    }

    #[test]
    fn success_stays_success() {
        let ending = Ending { reason: "Terminated", message: "m".to_owned(), disruption: None };
        let ended = ended(status(json!({ "phase": "Succeeded" })), &ending, None);
        assert_eq!(ended, status(json!({ "phase": "Succeeded", "reason": "Terminated", "message": "m" })));
    }
}
