//! Sends the events of actions; their wording is that of upstream.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::ActContext;
use super::PodError;
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
    let millis = duration.as_millis();
    if millis == 0 {
        return "0s".to_owned();
    }
    if millis < 1000 {
        return format!("{millis}ms");
    }
    let (minutes, rest) = (millis / 60_000, millis % 60_000);
    let fraction = match rest % 1000 {
        0 => String::new(),
        fraction => format!(".{fraction:03}").trim_end_matches('0').to_owned(),
    };
    let seconds = format!("{}{fraction}s", rest / 1000);
    match (minutes / 60, minutes % 60) {
        (0, 0) => seconds,
        (0, minutes) => format!("{minutes}m{seconds}"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let table =
            [(0, "0s"), (7, "7ms"), (1000, "1s"), (1230, "1.23s"), (123_400, "2m3.4s"), (3_600_001, "1h0m0.001s")];
        for (millis, expected) in table {
            assert_eq!(duration(Duration::from_millis(millis)), expected);
        }
    }
}
