//! Requests to the API server.

use std::time::Duration;
use std::time::SystemTime;

use prometheus::Histogram;
use prometheus::HistogramVec;
use prometheus::IntCounterVec;
use prometheus::IntGauge;

use super::buckets;
use super::register::Register;
use super::time_left::TimeLeft;
use super::values::code;
use crate::model::Clock;

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
    plugin_left: TimeLeft,
    plugin_ages: Histogram,
    transports: IntGauge,
    transport_calls: IntCounterVec,
    transport_ends: IntCounterVec,
    authority_reloads: IntCounterVec,
    lookups: HistogramVec,
}

/// The outcome of reloading the API server's certificate authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthorityReload {
    /// It has not changed.
    Unchanged,
    /// It is another one.
    Updated,
    /// It cannot be read.
    Unreadable,
    /// Nothing is in it.
    Empty,
    /// It holds no valid certificates.
    Invalid,
}

impl AuthorityReload {
    /// Upstream's `result` and `reason`.
    const fn labels(self) -> [&'static str; 2] {
        match self {
            Self::Unchanged => ["success", "unchanged"],
            Self::Updated => ["success", "updated"],
            Self::Unreadable => ["failure", "read_error"],
            Self::Empty => ["failure", "empty"],
            Self::Invalid => ["failure", "ca_parse_error"],
        }
    }
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
                "[ALPHA] Retries that the API server asked for or a broken connection required, by their own outcome.",
                &["code", "host", "verb"],
            ),
            durations: seconds(
                "rest_client_request_duration_seconds",
                "[ALPHA] Time from a request to the end of its answer, with waits and retries; watches are left out.",
            ),
            waits: seconds(
                "rest_client_rate_limiter_duration_seconds",
                "[ALPHA] Time that requests waited for the rate limiter.",
            ),
            request_sizes: bytes("rest_client_request_size_bytes", "[ALPHA] Size of requests."),
            response_sizes: bytes("rest_client_response_size_bytes", "[ALPHA] Size of answers, where it is known."),
            plugin_calls: register.counters(
                "rest_client_exec_plugin_call_total",
                "[ALPHA] Runs of the credential plugin, by how they ended.",
                &["call_status", "code"],
            ),
            plugin_left: register.time_left(
                "rest_client_exec_plugin_ttl_seconds",
                "[ALPHA] Remaining validity of the credential plugin's certificate; +Inf without one.",
            ),
            plugin_ages: register.histogram(
                "rest_client_exec_plugin_certificate_rotation_age",
                "[ALPHA] Age of the credential plugin's certificates when they were replaced, in seconds.",
                buckets::AGE,
            ),
            transports: register
                .gauge("rest_client_transport_cache_entries", "[ALPHA] Transports that clients share connections by."),
            transport_calls: register.counters(
                "rest_client_transport_create_calls_total",
                "[ALPHA] Transports that clients requested: new ones (miss) or shared ones (hit).",
                &["result"],
            ),
            transport_ends: register.counters(
                "rest_client_transport_cache_gc_calls_total",
                "[ALPHA] Transports that were given up because no client used them any more.",
                &["result"],
            ),
            authority_reloads: register.counters(
                "rest_client_transport_ca_reload_total",
                "[ALPHA] Reloads of the certificate authority, by outcome.",
                &["result", "reason"],
            ),
            lookups: register.histograms(
                "rest_client_dns_resolution_duration_seconds",
                "[ALPHA] Time to resolve the API server's name.",
                buckets::LOOKUP,
                &["host"],
            ),
        }
    }

    /// The credential plugin was run; `status` is upstream's name of the outcome, `code` its exit code or 1.
    pub fn plugin_ran(&self, status: &'static str, code: i32) {
        self.plugin_calls.with_label_values(&[status, &code.to_string()]).inc();
    }

    /// When its certificate expires; `None`: it has issued none.
    pub fn plugin_expires(&self, end: Option<SystemTime>) {
        self.plugin_left.set(end, Clock::System);
    }

    /// Its certificate was replaced at this age.
    pub fn plugin_rotated(&self, age: Duration) {
        self.plugin_ages.observe(age.as_secs_f64());
    }

    /// The first client of a transport: it was made.
    pub fn transport_made(&self) {
        self.transport_calls.with_label_values(&["miss"]).inc();
        self.transports.inc();
    }

    /// Another client of the same transport.
    pub fn transport_shared(&self) {
        self.transport_calls.with_label_values(&["hit"]).inc();
    }

    /// The last client of a transport was dropped.
    pub fn transport_dropped(&self) {
        self.transport_ends.with_label_values(&["deleted"]).inc();
        self.transports.dec();
    }

    /// The certificate authority was read again.
    pub fn authority_reloaded(&self, outcome: AuthorityReload) {
        self.authority_reloads.with_label_values(&outcome.labels()).inc();
    }

    /// A DNS lookup ended.
    pub fn looked_up(&self, host: &str, took: Duration) {
        self.lookups.with_label_values(&[host]).observe(took.as_secs_f64());
    }

    /// An attempt ended with a status code, or without an answer (`None`).
    pub fn answered(&self, method: &str, host: &str, status: Option<u16>) {
        self.requests.with_label_values(&[code(status).as_str(), host, method]).inc();
    }

    /// A request took so long, with all attempts.
    pub fn took(&self, method: &str, host: &str, took: Duration) {
        self.durations.with_label_values(&[host, method]).observe(took.as_secs_f64());
    }

    /// A request that was sent again ended with a status code, or without an answer (`None`).
    pub fn retried(&self, method: &str, host: &str, status: Option<u16>) {
        self.retries.with_label_values(&[code(status).as_str(), host, method]).inc();
    }

    /// A request waited for the rate limiter.
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
