//! Requests to the API server.

use std::time::Duration;

use prometheus::{Gauge, Histogram, HistogramVec, IntCounterVec};

use super::buckets;
use super::register::Register;

const PLACE: [&str; 2] = ["host", "verb"];

/// Requests to the API server.
#[derive(Debug)]
pub struct RestClient {
    requests: IntCounterVec,
    retries: IntCounterVec,
    durations: HistogramVec,
    waits: HistogramVec,
    request_sizes: HistogramVec,
    response_sizes: HistogramVec,
    plugin_calls: IntCounterVec,
    plugin_left: Gauge,
    plugin_ages: Histogram,
}

impl RestClient {
    pub(super) fn new(register: &Register<'_>) -> Self {
        let seconds = |name, help| register.histograms(name, help, buckets::REQUEST, &PLACE);
        let bytes = |name, help| register.histograms(name, help, buckets::BYTES, &PLACE);
        Self {
            requests: register.counters(
                "rest_client_requests_total",
                "[ALPHA] Requests to the API server.",
                &["code", "host", "method"],
            ),
            retries: register.counters(
                "rest_client_request_retries_total",
                "[ALPHA] Requests sent again because the API server asked for it.",
                &["code", "host", "verb"],
            ),
            durations: seconds(
                "rest_client_request_duration_seconds",
                "[ALPHA] Time from a request to the head of its answer.",
            ),
            waits: seconds("rest_client_rate_limiter_duration_seconds", "[ALPHA] Time requests waited for their turn."),
            request_sizes: bytes("rest_client_request_size_bytes", "[ALPHA] Size of requests."),
            response_sizes: bytes("rest_client_response_size_bytes", "[ALPHA] Size of answers, where it is known."),
            plugin_calls: register.counters(
                "rest_client_exec_plugin_call_total",
                "[ALPHA] Runs of the credential plugin, by how they ended.",
                &["call_status", "code"],
            ),
            plugin_left: register.float_gauge(
                "rest_client_exec_plugin_ttl_seconds",
                "[ALPHA] How long what the credential plugin gave is still good for; +Inf without an end.",
            ),
            plugin_ages: register.histogram(
                "rest_client_exec_plugin_certificate_rotation_age",
                "[ALPHA] Age of the credential plugin's certificates when they were replaced, in seconds.",
                buckets::AGE,
            ),
        }
        .forever()
    }

    /// Nothing ends as long as there is no plugin.
    fn forever(self) -> Self {
        self.plugin_left.set(f64::INFINITY);
        self
    }

    /// The credential plugin was run; `status` is upstream's name of the outcome, `code` the exit code or 1.
    pub fn plugin_ran(&self, status: &'static str, code: i32) {
        self.plugin_calls.with_label_values(&[status, &code.to_string()]).inc();
    }

    /// What it gave is good for so many seconds more.
    pub fn plugin_left(&self, seconds: f64) {
        self.plugin_left.set(seconds);
    }

    /// Its certificate was replaced at this age.
    pub fn plugin_rotated(&self, age: Duration) {
        self.plugin_ages.observe(age.as_secs_f64());
    }

    /// An answer came, or none did (`None`).
    pub fn answered(&self, method: &str, host: &str, status: Option<u16>, took: Duration) {
        let code = status.map_or_else(|| "<error>".to_owned(), |status| status.to_string());
        self.requests.with_label_values(&[code.as_str(), host, method]).inc();
        self.durations.with_label_values(&[host, method]).observe(took.as_secs_f64());
    }

    /// The request is sent again.
    pub fn retried(&self, status: u16, method: &str, host: &str) {
        self.retries.with_label_values(&[status.to_string().as_str(), host, method]).inc();
    }

    /// It waited for its turn.
    pub fn waited(&self, method: &str, host: &str, took: Duration) {
        self.waits.with_label_values(&[host, method]).observe(took.as_secs_f64());
    }

    /// Bytes of its body.
    #[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
    pub fn sent(&self, method: &str, host: &str, bytes: usize) {
        self.request_sizes.with_label_values(&[host, method]).observe(bytes as f64);
    }

    /// Bytes of its answer.
    #[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
    pub fn received(&self, method: &str, host: &str, bytes: u64) {
        self.response_sizes.with_label_values(&[host, method]).observe(bytes as f64);
    }
}
