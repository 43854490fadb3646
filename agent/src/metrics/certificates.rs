//! Certificates of this node and of its pods.

use std::time::Duration;
use std::time::SystemTime;

use prometheus::Histogram;
use prometheus::IntCounter;

use super::buckets;
use super::register::Register;
use super::replaced::Replaced;
use super::time_left::TimeLeft;
use super::values::gauge;
use crate::model::Clock;

/// Certificates of this node and of its pods.
#[derive(Debug)]
pub struct Certificates {
    client_left: TimeLeft,
    client_failures: IntCounter,
    serving_left: TimeLeft,
    serving_ages: Histogram,
    serving_failures: IntCounter,
    of_pods: Replaced,
}

impl Certificates {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            client_left: register.time_left(
                "kubelet_certificate_manager_client_ttl_seconds",
                "[ALPHA] Time until the client certificate expires; negative after that, +Inf without one.",
            ),
            client_failures: register.counter(
                "kubelet_certificate_manager_client_expiration_renew_errors",
                "[ALPHA] Attempts to renew the client certificate that failed.",
            ),
            serving_left: register.time_left(
                "kubelet_certificate_manager_server_ttl_seconds",
                "[ALPHA] Time until the serving certificate expires; negative after that, +Inf without one.",
            ),
            serving_ages: register.histogram(
                "kubelet_certificate_manager_server_rotation_seconds",
                "[ALPHA] Age of serving certificates when they were replaced.",
                buckets::ROTATION,
            ),
            serving_failures: register.counter(
                "kubelet_server_expiration_renew_errors",
                "[ALPHA] Attempts to renew the serving certificate that failed.",
            ),
            of_pods: register.replaced(
                "kubelet_podcertificate_states",
                "[ALPHA] Sources of projected volumes that want a certificate of their pod, by signer and state.",
                &["signer_name", "state"],
            ),
        }
    }

    /// When the client certificate expires, by this clock; `None`: there is none.
    pub fn client_expires(&self, end: Option<SystemTime>, clock: Clock) {
        self.client_left.set(end, clock);
    }

    /// When the serving certificate expires, by this clock; `None`: there is none.
    pub fn serving_expires(&self, end: Option<SystemTime>, clock: Clock) {
        self.serving_left.set(end, clock);
    }

    /// The client certificate could not be renewed.
    pub fn client_renewal_failed(&self) {
        self.client_failures.inc();
    }

    /// The serving certificate could not be renewed.
    pub fn serving_renewal_failed(&self) {
        self.serving_failures.inc();
    }

    /// A serving certificate was replaced at this age.
    pub fn serving_rotated(&self, age: Duration) {
        self.serving_ages.observe(age.as_secs_f64());
    }

    /// Certificates of pods by signer and state; replaces all earlier counts.
    pub fn of_pods<'a>(&self, counts: impl IntoIterator<Item = (&'a str, &'static str, usize)>) {
        self.of_pods.replace(counts.into_iter().map(|(signer, state, count)| ([signer, state], gauge(count))));
    }
}
