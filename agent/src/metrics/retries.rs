//! Retries of failed operations.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;
use prometheus::Opts;
use prometheus::core::Collector;
use prometheus::core::Desc;
use prometheus::proto::MetricFamily;
use tokio::time::Instant;

use super::register::Register;
use super::values::gauge;

/// Retries.
#[derive(Debug)]
pub struct Retries {
    total: IntCounterVec,
    stuck: Stuck,
}

impl Retries {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            total: register.counters(
                "keblet_retries_total",
                "Failed attempts at operations on pods that are retried with a growing pause.",
                &["operation"],
            ),
            stuck: register.add(Stuck::new(
                "keblet_stuck_operations",
                "Operations on pods that have failed for more than three minutes.",
            )),
        }
    }

    /// An attempt failed and will be retried.
    pub fn retried(&self, operation: &'static str) {
        self.total.with_label_values(&[operation]).inc();
    }

    /// Targets of an operation are stuck, each until this time unless they are reported again.
    pub fn stuck(&self, operation: &'static str, until: Vec<Instant>) {
        self.stuck.set(operation, until);
    }
}

/// The number of stuck targets by operation. Counted for each scrape: nothing reports a target that no longer exists.
#[derive(Clone, Debug)]
struct Stuck {
    gauges: IntGaugeVec,
    until: Arc<Mutex<HashMap<&'static str, Vec<Instant>>>>,
}

impl Stuck {
    fn new(name: &str, help: &str) -> prometheus::Result<Self> {
        Ok(Self { gauges: IntGaugeVec::new(Opts::new(name, help), &["operation"])?, until: Arc::default() })
    }

    fn set(&self, operation: &'static str, until: Vec<Instant>) {
        // Values are replaced whole.
        self.until.lock().unwrap_or_else(PoisonError::into_inner).insert(operation, until);
    }
}

impl Collector for Stuck {
    fn desc(&self) -> Vec<&Desc> {
        self.gauges.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let now = Instant::now();
        for (operation, until) in &*self.until.lock().unwrap_or_else(PoisonError::into_inner) {
            let stuck = until.iter().filter(|until| now < **until).count();
            self.gauges.with_label_values(&[*operation]).set(gauge(stuck));
        }
        self.gauges.collect()
    }
}
