//! Pacing: rules by which one pod's work waits for another's. [`Pacing`] has the permits and priorities; it is made once
//! and passed explicitly. Each policy is in a file of its own, has a bound, and can be switched off.
//!
//! | Policy | What waits | Bound |
//! |---|---|---|
//! | [`StopLimiter`] | stops of pods, beyond two per processor | 2 s for the signal, 5 s for the sandbox of a pod that used its grace period |
//! | [`FirstStatusHold`] | the first status of a pod, while containers are being started | 200 ms |
//! | [`EventDeferral`] | events, while containers are being started or pods stopped | 2 s |
//!
//! [`RemovalPermits`] limit how many pods' content is removed at the same time, whatever the policy; no other work waits
//! for a removal. Upstream's own limits lie where they apply: the start queue of static pods with the workers, limits on
//! pulls with the images.

mod event_deferral;
mod first_status_hold;
mod priority;
mod removals;
mod stop_limiter;

pub use self::event_deferral::EventDeferral;
pub use self::first_status_hold::FirstStatusHold;
pub use self::priority::Priority;
pub use self::priority::PriorityGuard;
pub use self::removals::RemovalPermits;
pub use self::stop_limiter::StopLimiter;
pub use self::stop_limiter::StopPermit;

/// Which policies are on. Set by `pacing` of `KebletConfiguration`, for measurements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PacingPolicy {
    /// [`StopLimiter`].
    pub stop_limiter: bool,
    /// [`FirstStatusHold`].
    pub held_back_statuses: bool,
    /// [`EventDeferral`].
    pub deferred_events: bool,
}

impl Default for PacingPolicy {
    fn default() -> Self {
        Self { stop_limiter: true, held_back_statuses: true, deferred_events: true }
    }
}

/// All policies of one agent. Clones share them.
#[derive(Clone, Debug)]
pub struct Pacing {
    /// Container starts and pod stops in progress.
    pub priority: Priority,
    /// Limits concurrent stops of pods.
    pub stops: StopLimiter,
    /// Limits concurrent removals.
    pub removals: RemovalPermits,
    /// Holds back first statuses.
    pub first_status: FirstStatusHold,
    /// Defers events.
    pub events: EventDeferral,
}

impl Pacing {
    /// Permits for a machine with so many processors.
    pub fn new(policy: PacingPolicy, processors: usize) -> Self {
        let priority = Priority::default();
        let stops = StopLimiter::new(policy.stop_limiter, processors, priority.clone());
        Self {
            removals: RemovalPermits::new(stops.clone()),
            stops,
            first_status: FirstStatusHold::new(policy.held_back_statuses, priority.clone()),
            events: EventDeferral::new(policy.deferred_events, priority.clone()),
            priority,
        }
    }

    /// Permits for this machine.
    pub fn for_this_machine(policy: PacingPolicy) -> Self {
        Self::new(policy, std::thread::available_parallelism().map_or(1, usize::from))
    }
}
