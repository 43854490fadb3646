//! Calls to the container runtime.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntCounterVec;

use super::buckets;
use super::register::Register;

/// The container runtime.
#[derive(Debug)]
pub struct Runtime {
    calls: IntCounterVec,
    durations: HistogramVec,
    errors: IntCounterVec,
    sandbox: HistogramVec,
    sandbox_errors: IntCounterVec,
}

impl Runtime {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            calls: register.counters(
                "kubelet_runtime_operations_total",
                "[ALPHA] Calls to the container runtime.",
                &["operation_type"],
            ),
            durations: register.histograms(
                "kubelet_runtime_operations_duration_seconds",
                "[ALPHA] Duration of calls to the container runtime.",
                buckets::RUNTIME_CALL,
                &["operation_type"],
            ),
            errors: register.counters(
                "kubelet_runtime_operations_errors_total",
                "[ALPHA] Calls to the container runtime that failed.",
                &["operation_type"],
            ),
            sandbox: register.histograms(
                "kubelet_run_podsandbox_duration_seconds",
                "[ALPHA] Duration of making a sandbox.",
                buckets::USUAL,
                &["runtime_handler"],
            ),
            sandbox_errors: register.counters(
                "kubelet_run_podsandbox_errors_total",
                "[ALPHA] Sandboxes that could not be made.",
                &["runtime_handler"],
            ),
        }
    }

    /// A call ended; `operation` is upstream's label.
    pub fn call(&self, operation: &'static str, took: Duration, ok: bool) {
        self.calls.with_label_values(&[operation]).inc();
        self.durations.with_label_values(&[operation]).observe(took.as_secs_f64());
        if !ok {
            self.errors.with_label_values(&[operation]).inc();
        }
    }

    /// A sandbox was made, or not.
    pub fn sandbox(&self, handler: &str, took: Duration, ok: bool) {
        self.sandbox.with_label_values(&[handler]).observe(took.as_secs_f64());
        if !ok {
            self.sandbox_errors.with_label_values(&[handler]).inc();
        }
    }
}
