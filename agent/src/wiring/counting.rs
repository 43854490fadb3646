//! What rooms tell their observers, counted in the metrics.

use std::sync::Arc;
use std::time::Duration;

use crate::events::RelistReason;
use crate::metrics::Metrics;
use crate::metrics::SyncKind;
use crate::model::LifecycleEvent;
use crate::model::SyncOutcome;
use crate::pleg::PlegObserver;
use crate::runtime::CallObserver;
use crate::runtime::FinishedCall;
use crate::workers::worker::WorkerObserver;

/// Hands observations on to the metrics.
pub struct Counting {
    metrics: Arc<Metrics>,
}

impl Counting {
    /// Counts into `metrics`.
    pub fn new(metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { metrics })
    }
}

impl std::fmt::Debug for Counting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Counting")
    }
}

impl CallObserver for Counting {
    fn finished(&self, call: FinishedCall) {
        self.metrics.runtime.call(call.operation.metric(), call.duration, call.error.is_none());
    }
}

impl PlegObserver for Counting {
    fn event(&self, event: &LifecycleEvent, latency: Option<Duration>) {
        self.metrics.pleg.event(event.source, event.kind, latency);
    }

    fn relist(&self, reason: RelistReason, took: Duration, interval: Option<Duration>, ok: bool) {
        self.metrics.pleg.relist(reason.as_str(), took, interval, ok);
    }

    fn inspection(&self, took: Duration, ok: bool) {
        self.metrics.pleg.inspection(took, ok);
    }

    fn contradiction(&self) {
        self.metrics.pleg.contradiction();
    }

    fn oom_kill(&self, is_init: Option<bool>) {
        let victim = match is_init {
            Some(true) => "init",
            Some(false) => "child",
            None => "other",
        };
        self.metrics.sensors.oom_kill(victim);
    }
}

impl WorkerObserver for Counting {
    fn planned(&self, took: Duration) {
        self.metrics.workers.planned(took);
    }

    fn acted(&self, took: Duration, outcome: &SyncOutcome) {
        self.metrics.workers.acted("sync", took, outcome.is_ok());
        for start in &outcome.starts {
            let error = start.result.as_ref().err().map(|failure| failure.token.as_str());
            self.metrics.pods.container_started("container", error);
        }
    }

    fn pass(&self, operation: &'static str, took: Duration) {
        let kind = match operation {
            "terminating" => SyncKind::Kill,
            "terminated" => SyncKind::Terminated,
            _ => SyncKind::Sync,
        };
        self.metrics.workers.synced(kind, took);
    }
}
