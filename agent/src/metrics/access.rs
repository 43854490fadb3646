//! Authentication and authorization of the server's clients.

use std::time::Duration;

use prometheus::Histogram;
use prometheus::HistogramVec;
use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;

use super::buckets;
use super::register::Register;
use super::values::code;

/// Client certificates, tokens and reviews.
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
                &format!("[ALPHA] {what} reviews requested, by status code."),
                &["code"],
            ),
            durations: register.histograms(
                &durations,
                &format!("[ALPHA] Duration of {what} reviews, by status code."),
                buckets::REVIEW,
                &["code"],
            ),
        }
    }

    fn ended(&self, status: Option<u16>, took: Duration) {
        let code = code(status);
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
                "[ALPHA] Tokens of requests, by whether they were cached.",
                &["status"],
            ),
            token_durations: register.histograms(
                "authentication_token_cache_request_duration_seconds",
                "[ALPHA] Time to authenticate a token, by whether it was cached.",
                buckets::USUAL,
                &["status"],
            ),
            fetches: register.counters(
                "authentication_token_cache_fetch_total",
                "[ALPHA] Token reviews of uncached tokens, by outcome.",
                &["status"],
            ),
            fetching: register.gauges(
                "authentication_token_cache_active_fetch_count",
                "[ALPHA] Token reviews in flight, and requests blocked on them.",
                &["status"],
            ),
            expirations: register.histogram(
                "apiserver_client_certificate_expiration_seconds",
                "[ALPHA] Remaining validity of the client certificates of requests.",
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

    /// A client's token was looked up; `cached` if without a review.
    pub fn token_looked_up(&self, cached: bool, took: Duration) {
        let status = if cached { "hit" } else { "miss" };
        self.tokens.with_label_values(&[status]).inc();
        self.token_durations.with_label_values(&[status]).observe(took.as_secs_f64());
    }

    /// Adds to the token reviews in flight.
    pub fn token_reviews_in_flight(&self, more: i64) {
        self.fetching.with_label_values(&["in_flight"]).add(more);
    }

    /// Adds to the requests that wait for a token review.
    pub fn token_reviews_blocked(&self, more: i64) {
        self.fetching.with_label_values(&["blocked"]).add(more);
    }

    /// A token review ended.
    pub fn token_review_ended(&self, ok: bool) {
        self.fetches.with_label_values(&[if ok { "ok" } else { "error" }]).inc();
    }

    /// A client presented a certificate with this remaining validity in seconds; negative if it has expired.
    pub fn certificate_presented(&self, seconds: f64) {
        self.expirations.observe(seconds);
    }
}
