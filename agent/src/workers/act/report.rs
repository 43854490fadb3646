//! Sends the events of actions; their wording is that of upstream.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::ActContext;
use super::PodError;
use crate::model::go_duration;
use crate::recorder::EventType;
use crate::workers::generate::ContainerSpec;

impl ActContext {
    /// An event on the pod.
    pub(super) fn pod_event(&self, pod: &Pod, kind: EventType, reason: &str, message: &str) {
        self.recorder.pod_event(pod, "", kind, reason, message);
    }

    /// An event on one of its containers.
    pub(super) fn container_event(
        &self,
        pod: &Pod,
        spec: &ContainerSpec<'_>,
        kind: EventType,
        reason: &str,
        message: &str,
    ) {
        self.recorder.pod_event(pod, &spec.field_path(), kind, reason, message);
    }

    /// Sends the event of an error on the pod, if it has one.
    pub(in crate::workers) fn report(&self, pod: &Pod, error: &PodError) {
        if let Some(event) = error.event() {
            self.pod_event(pod, event.kind, &event.reason, &event.message);
        }
    }

    /// Sends the event of an error on a part of the pod, if it has one.
    pub(super) fn report_at(&self, pod: &Pod, field_path: &str, error: &PodError) {
        if let Some(event) = error.event() {
            self.recorder.pod_event(pod, field_path, event.kind, &event.reason, &event.message);
        }
    }

    /// Sends the event of a failed start on its container, if it has one.
    pub(super) fn report_start(&self, pod: &Pod, spec: &ContainerSpec<'_>, error: &PodError) {
        self.report_at(pod, &spec.field_path(), error);
    }
}

/// A duration in the notation of pod events, cut to milliseconds: `856ms`, `1.234s`, `2m3.4s`.
pub(super) fn duration(duration: Duration) -> String {
    go_duration(Duration::new(duration.as_secs(), duration.subsec_millis() * 1_000_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let table =
            [(0, "0s"), (7, "7ms"), (1000, "1s"), (1230, "1.23s"), (123_400, "2m3.4s"), (3_600_001, "1h0m0.001s")];
        for (millis, expected) in table {
            assert_eq!(duration(Duration::from_millis(millis) + Duration::from_nanos(999_999)), expected);
        }
    }
}
