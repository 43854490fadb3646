//! Interface to metrics.

use std::time::Duration;

use crate::events::RelistReason;
use crate::model::LifecycleEvent;

/// Observes the PLEG. Implemented by the metrics; calls must not block.
pub trait PlegObserver: Send + Sync + 'static {
    /// A lifecycle event, with the time since it happened, if known.
    fn event(&self, event: &LifecycleEvent, latency: Option<Duration>);
    /// A relist ended; `interval` is the time since the beginning of the last successful one, up to its own.
    fn relist(&self, reason: RelistReason, took: Duration, interval: Option<Duration>, ok: bool);
    /// An inspection of one pod ended.
    fn inspection(&self, took: Duration, ok: bool);
    /// The runtime did not confirm an exit that the kernel proved.
    fn contradiction(&self);
}
