//! The conditions PodResizePending and PodResizeInProgress of pods, as upstream's status manager keeps them. Pure.

use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// A resize waits to be allocated, or never will be.
const PENDING: &str = "PodResizePending";
/// What is allocated is being applied.
const IN_PROGRESS: &str = "PodResizeInProgress";
/// Reason of an allocated resize that cannot be applied.
const ERROR: &str = "Error";

/// Why a resize is not allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pending {
    /// The node cannot do it at the moment; it is tried again.
    Deferred,
    /// The node will never do it.
    Infeasible,
}

impl Pending {
    /// Both, in the order of metrics.
    pub const ALL: [Self; 2] = [Self::Deferred, Self::Infeasible];

    /// The reason of the condition.
    pub fn reason(self) -> &'static str {
        match self {
            Self::Deferred => "Deferred",
            Self::Infeasible => "Infeasible",
        }
    }
}

/// The conditions of one pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ResizeConditions {
    pub(super) pending: Option<PodCondition>,
    pub(super) in_progress: Option<PodCondition>,
    /// What was allocated last has replaced something that was not applied completely.
    pub(super) has_replaced: bool,
}

impl ResizeConditions {
    /// Those that an earlier agent sent.
    pub(super) fn read_back(pod: &Pod, now: SystemTime) -> Self {
        let sent = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let find = |type_: &str| {
            let found = sent.iter().find(|condition| condition.type_ == type_ && condition.status == "True");
            found.map(|found| PodCondition { last_transition_time: Some(seconds(now)), ..found.clone() })
        };
        Self { pending: find(PENDING), in_progress: find(IN_PROGRESS), has_replaced: false }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_none() && self.in_progress.is_none()
    }

    /// All there are, in the order of the status.
    pub(super) fn list(&self) -> Vec<PodCondition> {
        self.pending.iter().chain(&self.in_progress).cloned().collect()
    }

    /// The resize of this generation is refused. True on the first refusal, another reason or another generation; the same
    /// refusal again changes nothing.
    pub(super) fn set_pending(
        &mut self,
        pending: Pending,
        message: &str,
        generation: Option<i64>,
        now: SystemTime,
    ) -> bool {
        let before = self.pending.take();
        let same_reason = before.as_ref().is_some_and(|before| before.reason.as_deref() == Some(pending.reason()));
        let same_generation = before.as_ref().is_some_and(|before| before.observed_generation == generation);
        let is_repeated = same_reason
            && same_generation
            && before.as_ref().is_some_and(|before| before.message.as_deref().unwrap_or_default() == message);
        if is_repeated {
            self.pending = before;
            return false;
        }
        let since = before.filter(|_| same_reason).and_then(|before| before.last_transition_time);
        self.pending = Some(PodCondition {
            last_transition_time: Some(since.unwrap_or_else(|| seconds(now))),
            ..condition(PENDING, pending.reason(), message, generation, now)
        });
        !(same_reason && same_generation)
    }

    /// The resize of this generation is allocated.
    pub(super) fn accept(&mut self, generation: Option<i64>, now: SystemTime) {
        self.pending = None;
        self.in_progress = Some(condition(IN_PROGRESS, "", "", generation, now));
    }

    /// Something allocated is not applied. An existing condition keeps reason, message and generation.
    pub(super) fn begin(&mut self, generation: Option<i64>, now: SystemTime) {
        self.in_progress.get_or_insert_with(|| condition(IN_PROGRESS, "", "", generation, now));
    }

    /// What is allocated cannot be applied. True if reason or message are others than before.
    pub(super) fn fail(&mut self, message: &str, generation: Option<i64>, now: SystemTime) -> bool {
        let before = self.in_progress.take();
        let reason_of = |condition: &PodCondition| condition.reason.clone().unwrap_or_default();
        let same_reason = before.as_ref().is_some_and(|before| reason_of(before) == ERROR);
        if same_reason && before.as_ref().is_some_and(|before| before.message.as_deref() == Some(message)) {
            self.in_progress = before;
            return false;
        }
        let since = before.as_ref().filter(|_| same_reason).and_then(|before| before.last_transition_time.clone());
        let generation = before.map_or(generation, |before| before.observed_generation);
        self.in_progress = Some(PodCondition {
            last_transition_time: Some(since.unwrap_or_else(|| seconds(now))),
            ..condition(IN_PROGRESS, ERROR, message, generation, now)
        });
        true
    }
}

fn condition(type_: &str, reason: &str, message: &str, generation: Option<i64>, now: SystemTime) -> PodCondition {
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    PodCondition {
        type_: type_.to_owned(),
        status: "True".to_owned(),
        reason: text(reason),
        message: text(message),
        observed_generation: generation,
        last_probe_time: Some(seconds(now)),
        last_transition_time: Some(seconds(now)),
    }
}

/// The API's time, which has whole seconds.
fn seconds(wall: SystemTime) -> Time {
    let since = wall.duration_since(SystemTime::UNIX_EPOCH).as_ref().map_or(0, Duration::as_secs);
    let second = i64::try_from(since).unwrap_or(i64::MAX);
    Time(Timestamp::from_second(second).unwrap_or(Timestamp::UNIX_EPOCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn brief(condition: &Option<PodCondition>) -> String {
        let Some(condition) = condition else { return "none".to_owned() };
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let since = condition.last_transition_time.as_ref().map_or(0, |time| time.0.as_second());
        let generation = condition.observed_generation.unwrap_or_default();
        format!("{}:{}:{generation}@{since}", text(&condition.reason), text(&condition.message))
    }

    #[test]
    fn a_refusal_is_news_by_reason_and_generation() {
        let mut conditions = ResizeConditions::default();
        let mut set_pending = |pending, message, generation, now| {
            let news = conditions.set_pending(pending, message, Some(generation), at(now));
            (news, brief(&conditions.pending))
        };
        assert_eq!(set_pending(Pending::Deferred, "a", 2, 10), (true, "Deferred:a:2@10".to_owned()));
        assert_eq!(set_pending(Pending::Deferred, "a", 2, 20), (false, "Deferred:a:2@10".to_owned()));
        assert_eq!(set_pending(Pending::Deferred, "b", 2, 30), (false, "Deferred:b:2@10".to_owned()));
        assert_eq!(set_pending(Pending::Deferred, "b", 3, 40), (true, "Deferred:b:3@10".to_owned()));
        assert_eq!(set_pending(Pending::Infeasible, "b", 3, 50), (true, "Infeasible:b:3@50".to_owned()));
    }

    #[test]
    fn one_resize_is_in_progress_while_the_next_is_pending() {
        let mut conditions = ResizeConditions::default();
        conditions.accept(Some(2), at(1));
        conditions.set_pending(Pending::Deferred, "m", Some(3), at(2));
        conditions.begin(Some(3), at(3));
        let both = [brief(&conditions.pending), brief(&conditions.in_progress)];
        assert_eq!(both, ["Deferred:m:3@2", "::2@1"]);
        let types: Vec<String> = conditions.list().into_iter().map(|condition| condition.type_).collect();
        assert_eq!(types, [PENDING, IN_PROGRESS]);
        conditions.accept(Some(3), at(4));
        assert_eq!([brief(&conditions.pending), brief(&conditions.in_progress)], ["none", "::3@4"]);
    }

    #[test]
    fn an_error_stays_until_the_next_acceptance() {
        let mut conditions = ResizeConditions::default();
        conditions.accept(Some(2), at(1));
        assert!(conditions.fail("refused", Some(9), at(2)));
        assert!(!conditions.fail("refused", Some(9), at(3)));
        conditions.begin(Some(9), at(4));
        assert_eq!(brief(&conditions.in_progress), "Error:refused:2@2");
        assert!(conditions.fail("otherwise", Some(9), at(5)));
        assert_eq!(brief(&conditions.in_progress), "Error:otherwise:2@2");
        conditions.accept(Some(3), at(6));
        assert_eq!(brief(&conditions.in_progress), "::3@6");
    }

    #[test]
    fn conditions_are_read_back_from_the_api() {
        let pod: Pod = serde_json::from_value(serde_json::json!({ "status": { "conditions": [
            { "type": "Ready", "status": "True" },
            { "type": PENDING, "status": "True", "reason": "Deferred", "message": "m", "observedGeneration": 3,
              "lastTransitionTime": "1970-01-01T00:00:01Z" },
        ] } }))
        .expect("a pod");
        let conditions = ResizeConditions::read_back(&pod, at(9));
        assert_eq!([brief(&conditions.pending), brief(&conditions.in_progress)], ["Deferred:m:3@9", "none"]);
    }
}
