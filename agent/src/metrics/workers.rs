//! Pod workers, their plans and actions.

use std::time::Duration;

use prometheus::Histogram;
use prometheus::HistogramVec;
use prometheus::IntCounterVec;

use super::buckets;
use super::register::Register;

/// Pod workers.
#[derive(Debug)]
pub struct Workers {
    sync: HistogramVec,
    wait: Histogram,
    plan: Histogram,
    action: HistogramVec,
    action_errors: IntCounterVec,
}

/// The label `operation_type` of a worker's pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncKind {
    /// First sync of a pod.
    Create,
    /// The pod changed.
    Update,
    /// A periodic pass without a change.
    Sync,
    /// The pod is being stopped.
    Kill,
    /// The pod has stopped and is cleaned up.
    Terminated,
}

impl SyncKind {
    const fn label(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Sync => "sync",
            Self::Kill => "kill",
            Self::Terminated => "terminated",
        }
    }
}

impl Workers {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            sync: register.histograms(
                "kubelet_pod_worker_duration_seconds",
                "[ALPHA] Duration of one sync of a pod.",
                buckets::USUAL,
                &["operation_type"],
            ),
            wait: register.histogram(
                "kubelet_pod_worker_start_duration_seconds",
                "[ALPHA] From first seeing a pod to its worker's start.",
                buckets::USUAL,
            ),
            plan: register.histogram(
                "keblet_plan_duration_seconds",
                "Duration of deciding what to do with a pod.",
                buckets::COMPUTE,
            ),
            action: register.histograms(
                "keblet_action_duration_seconds",
                "Duration of one action on a pod, by kind.",
                buckets::LATENCY,
                &["action"],
            ),
            action_errors: register.counters(
                "keblet_action_errors_total",
                "Actions on pods that failed, by kind.",
                &["action"],
            ),
        }
    }

    /// One sync ended.
    pub fn synced(&self, kind: SyncKind, took: Duration) {
        self.sync.with_label_values(&[kind.label()]).observe(took.as_secs_f64());
    }

    /// A worker started this long after its pod was first seen.
    pub fn started(&self, since_seen: Duration) {
        self.wait.observe(since_seen.as_secs_f64());
    }

    /// A decision was made.
    pub fn planned(&self, took: Duration) {
        self.plan.observe(took.as_secs_f64());
    }

    /// An action ended; `action` is its kind, such as `start-container`.
    pub fn acted(&self, action: &'static str, took: Duration, ok: bool) {
        self.action.with_label_values(&[action]).observe(took.as_secs_f64());
        if !ok {
            self.action_errors.with_label_values(&[action]).inc();
        }
    }
}
