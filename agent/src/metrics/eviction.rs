//! Evictions of pods.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;

use super::buckets;
use super::register::Register;
use super::values::gauge;

/// Evictions.
#[derive(Debug)]
pub struct Eviction {
    evictions: IntCounterVec,
    preemptions: IntCounterVec,
    stats_age: HistogramVec,
    decision: HistogramVec,
    memory: IntGaugeVec,
}

impl Eviction {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            evictions: register.counters(
                "kubelet_evictions",
                "[ALPHA] Pods evicted, by the signal or the limit that caused it.",
                &["eviction_signal"],
            ),
            preemptions: register.counters(
                "kubelet_preemptions",
                "[ALPHA] Pods evicted in favour of a critical one, by the resource that it lacked first.",
                &["preemption_signal"],
            ),
            stats_age: register.histograms(
                "kubelet_eviction_stats_age_seconds",
                "[ALPHA] Age of the statistics that pods were evicted by.",
                buckets::USUAL,
                &["eviction_signal"],
            ),
            decision: register.histograms(
                "keblet_eviction_decision_seconds",
                "Time from what woke the eviction manager to its decision to terminate a pod.",
                buckets::LATENCY,
                &["cause"],
            ),
            memory: register.gauges(
                "keblet_node_memory_available_bytes",
                "Memory that the node has left: the capacity less the working set, as kubelets count it, and the kernel's \
                 estimate MemAvailable.",
                &["source"],
            ),
        }
    }

    /// Memory that the node has left, by working set and by the kernel's estimate.
    pub fn memory_available(&self, working_set: u64, mem_available: Option<u64>) {
        self.memory.with_label_values(&["working_set"]).set(gauge(working_set));
        if let Some(bytes) = mem_available {
            self.memory.with_label_values(&["mem_available"]).set(gauge(bytes));
        }
    }

    /// A pod was evicted in favour of a critical one that lacked this resource.
    pub fn preempted(&self, resource: &str) {
        self.preemptions.with_label_values(&[resource]).inc();
    }

    /// A pod was evicted for a signal, such as `memory.available`, or a limit, such as `emptydirfs.limit`.
    pub fn evicted(&self, signal: &'static str) {
        self.evictions.with_label_values(&[signal]).inc();
    }

    /// A decision was based on statistics of this age.
    pub fn stats_age(&self, signal: &'static str, age: Duration) {
        self.stats_age.with_label_values(&[signal]).observe(age.as_secs_f64());
    }

    /// It was decided to terminate a pod. `cause`: what woke the manager, `poll`,
    /// `pressure`, `memory-events`, `limits` or `disk`.
    pub fn decided(&self, cause: &'static str, took: Duration) {
        self.decision.with_label_values(&[cause]).observe(took.as_secs_f64());
    }
}
