//! Retries of failed operations.

use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;

use super::register::Register;
use super::values::gauge;

/// Retries.
#[derive(Debug)]
pub struct Retries {
    total: IntCounterVec,
    stuck: IntGaugeVec,
}

impl Retries {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            total: register.counters(
                "keblet_retries_total",
                "Failed attempts at operations on pods that are retried with a growing pause.",
                &["operation"],
            ),
            stuck: register.gauges(
                "keblet_stuck_operations",
                "Operations on pods that have failed for more than three minutes.",
                &["operation"],
            ),
        }
    }

    /// An attempt failed and will be retried.
    pub fn retried(&self, operation: &'static str) {
        self.total.with_label_values(&[operation]).inc();
    }

    /// So many targets of an operation are stuck.
    pub fn stuck(&self, operation: &'static str, count: usize) {
        self.stuck.with_label_values(&[operation]).set(gauge(count));
    }
}
