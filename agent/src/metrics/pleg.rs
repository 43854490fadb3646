//! Relists, inspections and lifecycle events.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::SystemTime;

use prometheus::Gauge;
use prometheus::Histogram;
use prometheus::HistogramVec;
use prometheus::IntCounter;
use prometheus::IntCounterVec;

use super::buckets;
use super::register::Register;
use crate::model::LifecycleKind;
use crate::model::Source;

/// The pod lifecycle event generator.
#[derive(Debug)]
pub struct Pleg {
    relist: Histogram,
    interval: Histogram,
    last_seen: Gauge,
    /// The last list of all pods succeeded.
    is_listed: AtomicBool,
    pod_relist: Histogram,
    connected: IntCounter,
    connection_errors: IntCounter,
    stream_latency: Histogram,
    relists: IntCounterVec,
    inspections: IntCounterVec,
    events: IntCounterVec,
    latency: HistogramVec,
    contradictions: IntCounter,
}

impl Pleg {
    pub(super) fn new(register: &Register<'_>) -> Self {
        // Pods with events are a set, not a queue: nothing is ever dropped, so this stays 0.
        register.counter("kubelet_pleg_discard_events", "[ALPHA] Lifecycle events that were dropped.");
        Self {
            relist: register.histogram(
                "kubelet_pleg_relist_duration_seconds",
                "[ALPHA] Duration of listing all pods.",
                buckets::USUAL,
            ),
            interval: register.histogram(
                "kubelet_pleg_relist_interval_seconds",
                "[ALPHA] Time from the start of the last successful list of all pods to that of the next.",
                buckets::USUAL,
            ),
            last_seen: register.float_gauge(
                "kubelet_pleg_last_seen_seconds",
                "[ALPHA] Unix time at which the last successful list of all pods began, or the runtime answered later.",
            ),
            is_listed: AtomicBool::default(),
            pod_relist: register.histogram(
                "kubelet_pleg_pod_relist_duration_seconds",
                "[ALPHA] Duration of inspecting one pod.",
                buckets::USUAL,
            ),
            connected: register.counter(
                "kubelet_evented_pleg_connection_success_count",
                "[ALPHA] Times the runtime's event stream stood.",
            ),
            connection_errors: register.counter(
                "kubelet_evented_pleg_connection_error_count",
                "[ALPHA] Failed attempts to open the runtime's event stream.",
            ),
            stream_latency: register.histogram(
                "kubelet_evented_pleg_connection_latency_seconds",
                "[ALPHA] From the creation of a runtime event to its receipt.",
                buckets::USUAL,
            ),
            relists: register.counters(
                "keblet_relists_total",
                "Lists of all pods, by what asked for them and how they ended.",
                &["reason", "result"],
            ),
            inspections: register.counters(
                "keblet_inspections_total",
                "Inspections of one pod, by how they ended.",
                &["result"],
            ),
            events: register.counters(
                "keblet_events_total",
                "Pod lifecycle events, by kind and by the source that reported them first.",
                &["source", "type"],
            ),
            latency: register.histograms(
                "keblet_event_latency_seconds",
                "From the moment in the kernel to the lifecycle event, where the moment is known.",
                buckets::LATENCY,
                &["source", "type"],
            ),
            contradictions: register
                .counter("keblet_contradictions_total", "Exits the kernel proved and the runtime denied."),
        }
    }

    /// A list of all pods ended. `interval` is the time since the beginning of the last successful one, up to its own.
    pub fn relist(&self, reason: &'static str, took: Duration, interval: Option<Duration>, ok: bool) {
        self.relists.with_label_values(&[reason, result(ok)]).inc();
        self.relist.observe(took.as_secs_f64());
        if let Some(interval) = interval {
            self.interval.observe(interval.as_secs_f64());
        }
        self.is_listed.store(ok, Ordering::Relaxed);
        self.seen(SystemTime::now().checked_sub(took), ok);
    }

    /// An inspection of one pod ended.
    pub fn inspection(&self, took: Duration, ok: bool) {
        self.inspections.with_label_values(&[result(ok)]).inc();
        self.pod_relist.observe(took.as_secs_f64());
        // While events arrive all pods are listed every few minutes only, and each event requests an inspection.
        self.seen(Some(SystemTime::now()), ok);
    }

    /// The runtime reported whether it is ready. On an idle node nothing else shows for minutes that the PLEG works; alerts
    /// fire for a PLEG that was not seen for three minutes.
    pub fn runtime_answered(&self) {
        self.seen(Some(SystemTime::now()), self.is_listed.load(Ordering::Relaxed));
    }

    /// The runtime reported what runs, or did not. The time stays while it does not, so that its age shows for how long.
    fn seen(&self, at: Option<SystemTime>, ok: bool) {
        let at = at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        if let Some(at) = at.filter(|_| ok) {
            self.last_seen.set(at.as_secs_f64());
        }
    }

    /// A lifecycle event, with the time since it happened, where that is known.
    pub fn event(&self, source: Source, kind: LifecycleKind, latency: Option<Duration>) {
        let labels = [source.as_str(), kind.as_str()];
        self.events.with_label_values(&labels).inc();
        if let Some(latency) = latency {
            self.latency.with_label_values(&labels).observe(latency.as_secs_f64());
        }
    }

    /// Kernel and runtime disagreed about an exit.
    pub fn contradiction(&self) {
        self.contradictions.inc();
    }

    /// An attempt to open the runtime's event stream succeeded or failed.
    pub fn stream(&self, connected: bool) {
        if connected { self.connected.inc() } else { self.connection_errors.inc() }
    }

    /// A runtime event arrived, so long after the runtime made it.
    pub fn stream_event(&self, latency: Duration) {
        self.stream_latency.observe(latency.as_secs_f64());
    }
}

fn result(ok: bool) -> &'static str {
    if ok { "ok" } else { "error" }
}
