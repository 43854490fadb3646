//! Probes of containers. Exposed separately, as upstream does; the series of a probe end with it.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntCounterVec;
use prometheus::Registry;
use prometheus::proto::MetricFamily;

use super::buckets;
use super::register::Register;

/// Probes.
#[derive(Debug)]
pub struct Probes {
    registry: Registry,
    total: IntCounterVec,
    duration: HistogramVec,
}

/// Labels of a probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProbeOf<'a> {
    /// `Liveness`, `Readiness` or `Startup`.
    pub kind: &'a str,
    /// The container's name.
    pub container: &'a str,
    /// The pod's name.
    pub pod: &'a str,
    /// The pod's namespace.
    pub namespace: &'a str,
    /// The pod's UID.
    pub uid: &'a str,
}

/// Values of the label `result`.
const RESULTS: [&str; 2] = ["successful", "failed"];

impl Probes {
    pub(super) fn new(process_start: f64) -> Self {
        let registry = Registry::new();
        let register = Register::new(&registry);
        let help = "Unix time at which the process started.";
        register.float_gauge("process_start_time_seconds", help).set(process_start);
        let total = register.counters(
            "prober_probe_total",
            "[BETA] Runs of probes by result.",
            &["probe_type", "result", "container", "pod", "namespace", "pod_uid"],
        );
        let duration = register.histograms(
            "prober_probe_duration_seconds",
            "[ALPHA] Duration of successful runs, with their retries.",
            buckets::USUAL,
            &["probe_type", "container", "pod", "namespace"],
        );
        Self { registry, total, duration }
    }

    pub(super) fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }

    /// A run succeeded.
    pub fn succeeded(&self, probe: &ProbeOf<'_>, took: Duration) {
        self.total.with_label_values(&labels(probe, RESULTS[0])).inc();
        self.duration.with_label_values(&timed(probe)).observe(took.as_secs_f64());
    }

    /// A run failed. Its duration is not observed: it is the timeout more often than not.
    pub fn failed(&self, probe: &ProbeOf<'_>) {
        self.total.with_label_values(&labels(probe, RESULTS[1])).inc();
    }

    /// The probe has ended, and with it its series. Those that do not name the pod's UID stay if another probe has them, too.
    pub fn ended(&self, probe: &ProbeOf<'_>, shared: bool) {
        // There is no series to remove where there was no such result.
        for result in RESULTS {
            _ = self.total.remove_label_values(&labels(probe, result));
        }
        if !shared {
            _ = self.duration.remove_label_values(&timed(probe));
        }
    }
}

fn labels<'a>(probe: &ProbeOf<'a>, result: &'a str) -> [&'a str; 6] {
    [probe.kind, result, probe.container, probe.pod, probe.namespace, probe.uid]
}

fn timed<'a>(probe: &ProbeOf<'a>) -> [&'a str; 4] {
    [probe.kind, probe.container, probe.pod, probe.namespace]
}
