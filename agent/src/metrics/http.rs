//! Requests to our own servers.

use std::time::Duration;

use prometheus::HistogramVec;
use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;

use super::buckets;
use super::register::Register;

const LABELS: [&str; 4] = ["long_running", "method", "path", "server_type"];

/// Requests to our own servers.
#[derive(Debug)]
pub struct Http {
    requests: IntCounterVec,
    durations: HistogramVec,
    in_flight: IntGaugeVec,
    websockets: IntCounterVec,
}

/// The streaming subresources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subresource {
    /// The streams of a command.
    Exec,
    /// Those of the container itself.
    Attach,
    /// Connections to its ports.
    PortForward,
}

impl Subresource {
    fn label(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::Attach => "attach",
            Self::PortForward => "portforward",
        }
    }
}

/// The labels of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// One of the usual methods, or `other`.
    pub method: &'static str,
    /// First segment of a known path, or `other`.
    pub path: &'static str,
    /// `readwrite` or `readonly`.
    pub server: &'static str,
    /// It lasts until the client ends it.
    pub long_running: bool,
}

impl Request {
    fn labels(&self) -> [&'static str; 4] {
        let long_running = if self.long_running { "true" } else { "false" };
        [long_running, self.method, self.path, self.server]
    }
}

impl Http {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            requests: register.counters("kubelet_http_requests_total", "[ALPHA] Requests received.", &LABELS),
            durations: register.histograms(
                "kubelet_http_requests_duration_seconds",
                "[ALPHA] Duration of requests.",
                buckets::USUAL,
                &LABELS,
            ),
            in_flight: register.gauges("kubelet_http_inflight_requests", "[ALPHA] Requests being answered.", &LABELS),
            websockets: register.counters(
                "kubelet_websocket_streaming_requests_total",
                "[ALPHA] Streams over WebSockets that end here and not at the runtime.",
                &["subresource"],
            ),
        }
    }

    /// A request began.
    pub fn began(&self, request: &Request) {
        self.requests.with_label_values(&request.labels()).inc();
        self.in_flight.with_label_values(&request.labels()).inc();
    }

    /// A WebSocket session was requested that the agent terminates.
    pub fn websocket(&self, subresource: Subresource) {
        self.websockets.with_label_values(&[subresource.label()]).inc();
    }

    /// It was answered, or given up.
    pub fn ended(&self, request: &Request, took: Duration) {
        self.in_flight.with_label_values(&request.labels()).dec();
        self.durations.with_label_values(&request.labels()).observe(took.as_secs_f64());
    }
}
