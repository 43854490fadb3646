//! `/metrics/slis`: outcomes of health checks (KEP-3466), in a registry that can be reset.

use std::sync::Mutex;
use std::sync::PoisonError;

use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;
use prometheus::Registry;
use prometheus::proto::MetricFamily;

use super::register::Register;

/// Outcomes of requested health checks.
#[derive(Debug)]
pub struct Slis(Mutex<Families>);

#[derive(Debug)]
struct Families {
    registry: Registry,
    state: IntGaugeVec,
    outcomes: IntCounterVec,
    process_start: f64,
}

impl Families {
    fn new(process_start: f64) -> Self {
        let registry = Registry::new();
        let register = Register::new(&registry);
        let help = "Unix time at which the process started.";
        register.float_gauge("process_start_time_seconds", help).set(process_start);
        let state = register.gauges(
            "kubernetes_healthcheck",
            "[STABLE] Whether a health check passes: 1, or 0 if it fails.",
            &["name", "type"],
        );
        let outcomes = register.counters(
            "kubernetes_healthchecks_total",
            "[STABLE] Health checks by outcome.",
            &["name", "status", "type"],
        );
        Self { registry, state, outcomes, process_start }
    }
}

const KIND: &str = "healthz";

impl Slis {
    pub(super) fn new(process_start: f64) -> Self {
        Self(Mutex::new(Families::new(process_start)))
    }

    fn with<T>(&self, apply: impl FnOnce(&mut Families) -> T) -> T {
        // Families are replaced as a whole: a panic elsewhere leaves them usable.
        apply(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A check succeeded or failed.
    pub fn checked(&self, name: &str, ok: bool) {
        let status = if ok { "success" } else { "error" };
        self.with(|families| {
            families.state.with_label_values(&[name, KIND]).set(ok.into());
            families.outcomes.with_label_values(&[name, status, KIND]).inc();
        });
    }

    /// Removes all outcomes.
    pub fn reset(&self) {
        self.with(|families| *families = Families::new(families.process_start));
    }

    /// The families to expose.
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.with(|families| families.registry.gather())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(slis: &Slis) -> String {
        String::from_utf8(super::super::encode_text(&slis.gather()).expect("encodes")).expect("text")
    }

    #[test]
    fn counted_and_dropped() {
        let slis = Slis::new(1.5);
        slis.checked("ping", true);
        slis.checked("ping", false);
        let shown = text(&slis);
        for line in [
            "process_start_time_seconds 1.5",
            "kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 0",
            "kubernetes_healthchecks_total{name=\"ping\",status=\"error\",type=\"healthz\"} 1",
            "kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 1",
        ] {
            assert!(shown.lines().any(|found| found == line), "{line} is missing in\n{shown}");
        }
        slis.reset();
        let left = text(&slis);
        let samples: Vec<&str> = left.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(samples, ["process_start_time_seconds 1.5"]);
    }
}
