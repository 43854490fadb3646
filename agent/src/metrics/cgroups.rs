//! Cgroups of pods and QoS classes.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntGauge;

use super::buckets;
use super::register::Register;

/// Operations on cgroups, and memory that they protect.
#[derive(Debug)]
pub struct Cgroups {
    operations: HistogramVec,
    memory_min: IntGauge,
    memory_low: IntGauge,
}

impl Cgroups {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            operations: register.histograms(
                "kubelet_cgroup_manager_duration_seconds",
                "[ALPHA] Duration of operations on cgroups of pods and QoS classes.",
                buckets::USUAL,
                &["operation_type"],
            ),
            memory_min: register.gauge(
                "kubelet_memory_qos_node_memory_min_bytes",
                "[ALPHA] Bytes of memory of Guaranteed pods that the kernel never reclaims (memory.min).",
            ),
            memory_low: register.gauge(
                "kubelet_memory_qos_node_memory_low_bytes",
                "[ALPHA] Bytes of memory of Burstable pods that the kernel reclaims last (memory.low).",
            ),
        }
    }

    /// An operation (`create`, `update`, `destroy`) on a cgroup ended.
    pub fn operation(&self, operation: &'static str, took: Duration) {
        self.operations.with_label_values(&[operation]).observe(took.as_secs_f64());
    }

    /// Bytes of memory that are protected for Guaranteed and for Burstable pods.
    pub fn protected_memory(&self, guaranteed: i64, burstable: i64) {
        self.memory_min.set(guaranteed);
        self.memory_low.set(burstable);
    }
}
