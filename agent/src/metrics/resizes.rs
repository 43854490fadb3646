//! In-place changes of pods' resources.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntCounterVec;
use prometheus::IntGauge;
use prometheus::IntGaugeVec;

use super::register::Register;

/// Upper bounds of the durations of changes, milliseconds.
const MILLISECONDS: &[f64] = &[
    10.0, 50.0, 100.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 30_000.0, 60_000.0, 120_000.0, 300_000.0,
    600_000.0,
];

/// Resizes.
#[derive(Debug)]
pub struct Resizes {
    requested: IntCounterVec,
    duration: HistogramVec,
    pending: IntGaugeVec,
    in_progress: IntGauge,
    infeasible: IntCounterVec,
    accepted: IntCounterVec,
}

impl Resizes {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            requested: register.counters(
                "kubelet_container_requested_resizes_total",
                "[ALPHA] Changes of containers' resources that were requested.",
                &["operation", "requirement", "resource"],
            ),
            duration: register.histograms(
                "kubelet_pod_resize_duration_milliseconds",
                "[ALPHA] Time that it took to apply a resize, in milliseconds.",
                MILLISECONDS,
                &["success"],
            ),
            pending: register.gauges("kubelet_pod_pending_resizes", "[ALPHA] Resizes that wait.", &["reason"]),
            in_progress: register.gauge("kubelet_pod_in_progress_resizes", "[ALPHA] Resizes that are being applied."),
            infeasible: register.counters(
                "kubelet_pod_infeasible_resizes_total",
                "[ALPHA] Resizes that this node never does, by why.",
                &["reason_detail"],
            ),
            accepted: register.counters(
                "kubelet_pod_deferred_accepted_resizes_total",
                "[ALPHA] Resizes that were accepted after they had to wait, by what they were tried again for.",
                &["retry_trigger"],
            ),
        }
    }

    /// A change of a container was requested: `operation` is add, remove, increase or decrease, `requirement` requests or
    /// limits.
    pub fn requested(&self, operation: &str, requirement: &str, resource: &str) {
        self.requested.with_label_values(&[operation, requirement, resource]).inc();
    }

    /// Applying a resize took so long.
    pub fn actuated(&self, took: Duration, succeeded: bool) {
        let success = if succeeded { "true" } else { "false" };
        self.duration.with_label_values(&[success]).observe(took.as_secs_f64() * 1000.0);
    }

    /// So many wait for this reason (`deferred`, `infeasible`). A reason without any has no series, as upstream.
    pub fn set_pending(&self, reason: &str, count: i64) {
        match count {
            0 => _ = self.pending.remove_label_values(&[reason]),
            _ => self.pending.with_label_values(&[reason]).set(count),
        }
    }

    /// So many are being applied.
    pub fn set_in_progress(&self, count: i64) {
        self.in_progress.set(count);
    }

    /// A resize was found to be infeasible.
    pub fn infeasible(&self, detail: &str) {
        self.infeasible.with_label_values(&[detail]).inc();
    }

    /// A resize that had waited was accepted.
    pub fn deferred_accepted(&self, trigger: &str) {
        self.accepted.with_label_values(&[trigger]).inc();
    }
}
