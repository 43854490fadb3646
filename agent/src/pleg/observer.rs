//! What the PLEG tells whoever counts.

use std::time::Duration;

use crate::events::RelistReason;
use crate::model::LifecycleEvent;

/// Counts what the PLEG does. Implemented by the metrics; calls must be quick.
pub trait PlegObserver: Send + Sync + 'static {
    /// A lifecycle event, with the time since it happened, where that is known.
    fn event(&self, event: &LifecycleEvent, latency: Option<Duration>);
    /// A relist ended; `interval` is the time since the one before began.
    fn relist(&self, reason: RelistReason, took: Duration, interval: Option<Duration>, ok: bool);
    /// An inspection of one pod ended.
    fn inspection(&self, took: Duration, ok: bool);
    /// Runtime and kernel disagreed about a death.
    fn contradiction(&self);
    /// The kernel killed a process for want of memory: a container's init, another process of a container, or (`None`)
    /// one of a container that is not known.
    fn oom_kill(&self, is_init: Option<bool>);
}

/// Counts nothing.
pub struct NoObserver;

impl PlegObserver for NoObserver {
    fn event(&self, _event: &LifecycleEvent, _latency: Option<Duration>) {}
    fn relist(&self, _reason: RelistReason, _took: Duration, _interval: Option<Duration>, _ok: bool) {}
    fn inspection(&self, _took: Duration, _ok: bool) {}
    fn contradiction(&self) {}
    fn oom_kill(&self, _is_init: Option<bool>) {}
}
