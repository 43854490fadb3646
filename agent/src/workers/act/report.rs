//! Wording of results and events, as users of kubelets know them.

use std::time::Duration;

use indexmap::IndexSet;
use k8s_openapi::api::core::v1::Pod;

use super::ActContext;
use crate::model::StartFailure;
use crate::recorder::EventType;
use crate::workers::generate::ContainerSpec;

/// One failed action in the words of a pod's sync result.
pub(super) fn failed(action: &str, target: &str, token: &str, message: &str) -> String {
    format!("failed to {action:?} for {target:?} with {token}: {message:?}")
}

/// A start that failed, with nothing known of when to retry.
pub(super) fn failure(token: &str, message: impl Into<String>) -> StartFailure {
    StartFailure { token: token.to_owned(), message: message.into(), retry_at: None }
}

/// Several errors as one text, each once; one alone stands without brackets.
pub(super) fn aggregate(errors: &[String]) -> Option<String> {
    let distinct: IndexSet<&str> = errors.iter().map(String::as_str).collect();
    let joined = distinct.iter().copied().collect::<Vec<_>>().join(", ");
    match distinct.len() {
        0 => None,
        1 => Some(joined),
        _ => Some(format!("[{joined}]")),
    }
}

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

    /// A step of a start failed: event Failed, and the failure.
    pub(super) fn start_failed(
        &self,
        pod: &Pod,
        spec: &ContainerSpec<'_>,
        token: &str,
        message: impl Into<String>,
    ) -> StartFailure {
        let message = message.into();
        self.container_event(pod, spec, EventType::Warning, "Failed", &format!("Error: {message}"));
        failure(token, message)
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

    #[test]
    fn aggregates() {
        let table: [(&[&str], Option<&str>); 4] =
            [(&[], None), (&["a"], Some("a")), (&["a", "a"], Some("a")), (&["b", "a", "b"], Some("[b, a]"))];
        for (errors, expected) in table {
            let errors: Vec<String> = errors.iter().map(|error| (*error).to_owned()).collect();
            assert_eq!(aggregate(&errors).as_deref(), expected);
        }
    }

    #[test]
    fn failures() {
        let text = failed("StartContainer", "c", "ErrImagePull", "no \"x\"");
        assert_eq!(text, r#"failed to "StartContainer" for "c" with ErrImagePull: "no \"x\"""#);
    }
}
