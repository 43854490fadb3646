//! Those who ask our own servers, and what the API server was asked about them.

use std::time::Duration;

use prometheus::{Histogram, HistogramVec, IntCounterVec, IntGaugeVec};

use super::buckets;
use super::register::Register;

/// Certificates, tokens and reviews of those who ask.
#[derive(Debug)]
pub struct Access {
    token_reviews: Reviews,
    access_reviews: Reviews,
    tokens: IntCounterVec,
    token_durations: HistogramVec,
    fetches: IntCounterVec,
    fetching: IntGaugeVec,
    expirations: Histogram,
}

/// Reviews of one kind.
#[derive(Debug)]
struct Reviews {
    requests: IntCounterVec,
    durations: HistogramVec,
}

impl Reviews {
    fn new(register: &Register<'_>, kind: &str, what: &str) -> Self {
        let requests = format!("apiserver_delegated_{kind}_request_total");
        let durations = format!("apiserver_delegated_{kind}_request_duration_seconds");
        Self {
            requests: register.counters(
                &requests,
                &format!("[ALPHA] {what} reviews asked for, by the answer's status."),
                &["code"],
            ),
            durations: register.histograms(
                &durations,
                &format!("[ALPHA] Duration of {what} reviews, by the answer's status."),
                buckets::REVIEW,
                &["code"],
            ),
        }
    }

    fn ended(&self, status: Option<u16>, took: Duration) {
        let code = status.map_or_else(|| "<error>".to_owned(), |status| status.to_string());
        self.requests.with_label_values(&[&code]).inc();
        self.durations.with_label_values(&[&code]).observe(took.as_secs_f64());
    }
}

impl Access {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            token_reviews: Reviews::new(register, "authn", "Token"),
            access_reviews: Reviews::new(register, "authz", "Access"),
            tokens: register.counters(
                "authentication_token_cache_request_total",
                "[ALPHA] Tokens brought by clients, by whether they were remembered.",
                &["status"],
            ),
            token_durations: register.histograms(
                "authentication_token_cache_request_duration_seconds",
                "[ALPHA] Time until a token's owner was known, by whether it was remembered.",
                buckets::USUAL,
                &["status"],
            ),
            fetches: register.counters(
                "authentication_token_cache_fetch_total",
                "[ALPHA] Tokens that had to be asked about, by how that ended.",
                &["status"],
            ),
            fetching: register.gauges(
                "authentication_token_cache_active_fetch_count",
                "[ALPHA] Tokens being asked about, and requests that wait for that.",
                &["status"],
            ),
            expirations: register.histogram(
                "apiserver_client_certificate_expiration_seconds",
                "[ALPHA] How long the certificates that clients showed are still good for.",
                buckets::EXPIRATION,
            ),
        }
    }

    /// A token review ended with this status, or without an answer.
    pub fn token_reviewed(&self, status: Option<u16>, took: Duration) {
        self.token_reviews.ended(status, took);
    }

    /// An access review ended with this status, or without an answer.
    pub fn access_reviewed(&self, status: Option<u16>, took: Duration) {
        self.access_reviews.ended(status, took);
    }

    /// A client's token was looked up; `remembered` if nobody had to be asked.
    pub fn token_looked_up(&self, remembered: bool, took: Duration) {
        let status = if remembered { "hit" } else { "miss" };
        self.tokens.with_label_values(&[status]).inc();
        self.token_durations.with_label_values(&[status]).observe(took.as_secs_f64());
    }

    /// A token is being asked about, or no longer.
    pub fn token_asking(&self, more: i64) {
        self.fetching.with_label_values(&["in_flight"]).add(more);
    }

    /// A request waits for that, or no longer.
    pub fn token_waiting(&self, more: i64) {
        self.fetching.with_label_values(&["blocked"]).add(more);
    }

    /// A token was asked about.
    pub fn token_asked(&self, ok: bool) {
        self.fetches.with_label_values(&[if ok { "ok" } else { "error" }]).inc();
    }

    /// A client showed a certificate that is good for so many seconds more; less than none if it has expired.
    pub fn certificate_shown(&self, seconds: f64) {
        self.expirations.observe(seconds);
    }
}
