//! Whether a status is sent. Pure; time is an argument.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::NodeCondition;
use k8s_openapi::api::core::v1::NodeStatus;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;

use super::initial;
use super::patch;

/// The patch from one status to another, apart from the time of the last heartbeat; `None` if they differ in that and the
/// order of conditions at most.
pub(super) fn difference(old: Option<&NodeStatus>, new: Option<&NodeStatus>) -> Option<Value> {
    let bare = |status: &NodeStatus| {
        let mut conditions: Vec<NodeCondition> = status.conditions.clone().unwrap_or_default();
        conditions.iter_mut().for_each(|condition| condition.last_heartbeat_time = None);
        conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
        NodeStatus { conditions: Some(conditions), ..status.clone() }
    };
    let (old, new) = (old.map(bare), new.map(bare));
    if old == new {
        return None;
    }
    patch::of_status(&json!(old), &json!(new))
}

/// Adds the labels that every Node must have. True if one was missing or wrong. The deprecated ones are set at
/// registration only, as upstream: later they may be removed.
pub(super) fn restore_labels(node: &mut Node) -> bool {
    let labels = node.metadata.labels.get_or_insert_default();
    let mut restored = false;
    for (key, value) in initial::os_labels().filter(|(key, _)| !key.starts_with("beta.")) {
        restored |= labels.insert(key, value.clone()) != Some(value);
    }
    restored
}

/// When an unchanged status is due again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    period: Duration,
    due: Option<Instant>,
}

impl Schedule {
    /// Due at once, then every `period`.
    pub(super) fn new(period: Duration) -> Self {
        Self { period, due: None }
    }

    /// Nothing was sent yet.
    pub(super) fn is_new(&self) -> bool {
        self.due.is_none()
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.due.is_none_or(|due| now >= due)
    }

    /// A status was sent. After a change the next report is up to half a period earlier or later (`spread` in `[0, 1)`), so
    /// that nodes that changed together do not keep reporting together.
    pub(super) fn sent(&mut self, now: Instant, changed: bool, spread: f64) {
        let scattered = changed || self.due.is_none();
        let factor = if scattered { 0.5 + spread } else { 1.0 };
        self.due = Some(now + self.period.mul_f64(factor));
    }
}

/// The pause before the next computation: `period` and up to 4 % more.
pub(super) fn jittered(period: Duration, spread: f64) -> Duration {
    period + period.mul_f64(0.04 * spread)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_and_order_are_no_difference() {
        let status = |value| -> NodeStatus { serde_json::from_value(value).expect("a status") };
        let old = status(json!({ "conditions": [
            { "type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z" },
            { "type": "X", "status": "True" },
        ] }));
        let new = status(json!({ "conditions": [
            { "type": "X", "status": "True" },
            { "type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:10Z" },
        ] }));
        let differs = |new: &NodeStatus| difference(Some(&old), Some(new)).is_some();
        assert!(!differs(&new));
        let turned = status(
            json!({ "conditions": [{ "type": "Ready", "status": "False" }, { "type": "X", "status": "True" }] }),
        );
        assert!(differs(&turned));
        assert!(differs(&NodeStatus { phase: Some("x".to_owned()), ..old.clone() }));
    }

    #[test]
    fn missing_labels_come_back() {
        let mut node = Node::default();
        assert!(restore_labels(&mut node));
        assert!(!restore_labels(&mut node));
        node.metadata.labels.get_or_insert_default().insert("kubernetes.io/os".to_owned(), "plan9".to_owned());
        assert!(restore_labels(&mut node));
        let labels = node.metadata.labels.expect("labels");
        assert_eq!(labels["kubernetes.io/os"], "linux");
        assert_eq!(labels.into_keys().collect::<Vec<_>>(), ["kubernetes.io/arch", "kubernetes.io/os"]);
    }

    #[tokio::test(start_paused = true)]
    async fn unchanged_reports_are_periodic() {
        let (start, period) = (Instant::now(), Duration::from_secs(300));
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut schedule = Schedule::new(period);
        assert!(schedule.is_due(start), "the first one always");
        schedule.sent(start, false, 0.0);
        assert!(!schedule.is_due(at(149)) && schedule.is_due(at(150)), "scattered");
        schedule.sent(at(150), false, 0.9);
        assert!(!schedule.is_due(at(449)) && schedule.is_due(at(450)), "periodic");
        schedule.sent(at(450), true, 0.9);
        assert!(!schedule.is_due(at(869)) && schedule.is_due(at(870)), "scattered again");
    }
}
