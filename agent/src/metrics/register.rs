//! Makes families and registers them.
//!
//! Making and registering fails only for names that are malformed or taken, and all names are constants.

use std::cell::RefCell;
use std::collections::BTreeMap;

use prometheus::Gauge;
use prometheus::GaugeVec;
use prometheus::Histogram;
use prometheus::HistogramOpts;
use prometheus::HistogramVec;
use prometheus::IntCounter;
use prometheus::IntCounterVec;
use prometheus::IntGauge;
use prometheus::IntGaugeVec;
use prometheus::Opts;
use prometheus::Registry;
use prometheus::core::Collector;

use super::replaced::Replaced;
use super::time_left::TimeLeft;

/// Why making a family cannot fail.
const UNIQUE: &str = "names and labels are constants, each used once, which the tests show";

/// Makes families in a registry, and counts them.
pub(super) struct Register<'a> {
    registry: &'a Registry,
    /// Families by the stability that their help begins with.
    by_stability: RefCell<BTreeMap<&'static str, u64>>,
}

/// How stable a family is, at the beginning of its help; keblet's own have none.
const STABILITIES: [(&str, &str); 4] =
    [("[STABLE]", "STABLE"), ("[BETA]", "BETA"), ("[ALPHA]", "ALPHA"), ("[INTERNAL]", "INTERNAL")];

impl<'a> Register<'a> {
    /// Into this registry.
    pub(super) fn new(registry: &'a Registry) -> Self {
        Self { registry, by_stability: RefCell::default() }
    }

    /// Adds a collector.
    pub(super) fn add<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> C {
        let collector = made.expect(UNIQUE);
        for family in collector.desc() {
            if let Some((_, stability)) = STABILITIES.iter().find(|(mark, _)| family.help.starts_with(mark)) {
                *self.by_stability.borrow_mut().entry(stability).or_default() += 1;
            }
        }
        self.registry.register(Box::new(collector.clone())).expect(UNIQUE);
        collector
    }

    /// Sets the numbers of families, these included.
    pub(super) fn count(&self) {
        self.counter("hidden_metrics_total", "[BETA] Families that are hidden; none is.");
        self.counter("disabled_metrics_total", "[BETA] Families that are disabled; none is.");
        let help = "[BETA] Families there are, by how stable they are.";
        let total = self.counters("registered_metrics_total", help, &["deprecated_version", "stability_level"]);
        for (stability, count) in self.by_stability.borrow().iter() {
            total.with_label_values(&["", *stability]).inc_by(*count);
        }
    }

    pub(super) fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.add(IntCounter::new(name, help))
    }

    pub(super) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        self.add(IntCounterVec::new(Opts::new(name, help), labels))
    }

    pub(super) fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.add(IntGauge::new(name, help))
    }

    pub(super) fn float_gauge(&self, name: &str, help: &str) -> Gauge {
        self.add(Gauge::new(name, help))
    }

    /// Seconds that are left; infinitely many until a moment is set.
    pub(super) fn time_left(&self, name: &str, help: &str) -> TimeLeft {
        self.add(TimeLeft::new(name, help))
    }

    pub(super) fn float_gauges(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        self.add(GaugeVec::new(Opts::new(name, help), labels))
    }

    pub(super) fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        self.add(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    /// Gauges that are replaced together.
    pub(super) fn replaced(&self, name: &str, help: &str, labels: &[&str]) -> Replaced {
        Replaced::new(self.gauges(name, help, labels))
    }

    pub(super) fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        self.add(Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec())))
    }

    pub(super) fn histograms(&self, name: &str, help: &str, buckets: &[f64], labels: &[&str]) -> HistogramVec {
        self.add(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
    }
}
