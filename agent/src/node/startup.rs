//! Startup duration of the node, from boot to Ready, measured once for a new Node.

use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use crate::kernel::clock::BootTime;
use crate::metrics::Metrics;

/// Measures one start.
#[derive(Debug)]
pub(super) struct Startup {
    metrics: Arc<Metrics>,
    registered: Option<SystemTime>,
}

impl Startup {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, registered: None }
    }

    /// The Node was created; `began` is the time of the first attempt.
    pub(super) fn created(&mut self, began: SystemTime, now: SystemTime) {
        let process =
            SystemTime::UNIX_EPOCH + Duration::try_from_secs_f64(self.metrics.process_start).unwrap_or_default();
        let node = &self.metrics.node;
        node.startup_registration(seconds(process, began), seconds(began, now));
        if let Some(boot) = boot(now) {
            node.startup_pre_kubelet(seconds(boot, process));
        }
        self.registered = Some(now);
    }

    /// The Node is Ready. Measured once after its creation.
    pub(super) fn ready(&mut self, now: SystemTime) {
        let Some(registered) = self.registered.take() else { return };
        let total = boot(now).map(|boot| seconds(boot, now));
        self.metrics.node.startup_ready(seconds(registered, now), total);
    }
}

fn boot(now: SystemTime) -> Option<SystemTime> {
    now.checked_sub(Duration::from_nanos(BootTime::now()?.0))
}

fn seconds(from: SystemTime, to: SystemTime) -> f64 {
    to.duration_since(from).unwrap_or_default().as_secs_f64()
}
