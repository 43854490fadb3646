//! Events that were not delivered.

use prometheus::IntCounterVec;

use super::register::Register;

/// The event recorder.
#[derive(Debug)]
pub struct Recorder {
    lost: IntCounterVec,
}

impl Recorder {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            lost: register.counters(
                "keblet_events_lost_total",
                "Events that were not delivered to the API server, by cause.",
                &["reason"],
            ),
        }
    }

    /// An event was not delivered.
    pub fn lost(&self, why: &'static str) {
        self.lost.with_label_values(&[why]).inc();
    }
}
