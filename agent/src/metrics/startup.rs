//! Pod start latencies.

use std::time::Duration;

use prometheus::Gauge;
use prometheus::Histogram;

use super::buckets;
use super::register::Register;

/// Pod start latencies.
#[derive(Debug)]
pub struct Startup {
    until_running: Histogram,
    total: Histogram,
    level: Histogram,
    first_network: Gauge,
}

impl Startup {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            until_running: register.histogram(
                "kubelet_pod_start_duration_seconds",
                "[ALPHA] From first seeing a pod to finding it running.",
                buckets::POD_START,
            ),
            total: register.histogram(
                "kubelet_pod_start_total_duration_seconds",
                "[ALPHA] From creating a pod to seeing from the API server that it runs.",
                buckets::POD_START,
            ),
            level: register.histogram(
                "kubelet_pod_start_sli_duration_seconds",
                "[ALPHA] The same for stateless pods, without pulls and init containers.",
                buckets::POD_START,
            ),
            first_network: register.float_gauge(
                "kubelet_first_network_pod_start_sli_duration_seconds",
                "[INTERNAL] The same of the first pod with a network of its own.",
            ),
        }
    }

    /// A pod was observed running this long after it was first seen.
    pub fn running_after(&self, since_seen: Duration) {
        self.until_running.observe(since_seen.as_secs_f64());
    }

    /// A pod was seen running in the API server, so long after its creation; `level` is what of that counts against the
    /// node.
    pub fn measured(&self, total: Duration, level: Option<Duration>, first_with_network: bool) {
        self.total.observe(total.as_secs_f64());
        let Some(level) = level else { return };
        self.level.observe(level.as_secs_f64());
        if first_with_network {
            self.first_network.set(level.as_secs_f64());
        }
    }
}
