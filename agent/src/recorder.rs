//! The event recorder: upstream's reasons and messages on the object they concern. Without an API server events are
//! log lines; nothing is kept.

use k8s_openapi::api::core::v1::Pod;

/// `type` of a core/v1 Event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EventType {
    /// Something expected.
    Normal,
    /// Something an operator should see.
    Warning,
}

/// Records events. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Recorder {}

impl Recorder {
    /// An event on a pod, or on one of its containers (`field_path` like `spec.containers{web}`; empty for the pod).
    pub fn pod_event(&self, pod: &Pod, field_path: &str, kind: EventType, reason: &str, message: &str) {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        match kind {
            EventType::Normal => {
                tracing::info!(target: "keblet::recorder", pod = %format_args!("{namespace}/{name}"), field_path, reason, "{message}");
            }
            EventType::Warning => {
                tracing::warn!(target: "keblet::recorder", pod = %format_args!("{namespace}/{name}"), field_path, reason, "{message}");
            }
        }
    }
}
