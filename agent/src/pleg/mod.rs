//! Pod lifecycle event generation: the sole writer of the pod cache.
//!
//! Hints say where to look; an inspection (or a relist) says what is there; a proven death is laid over it. What
//! differs from the cached snapshot becomes lifecycle events and wakes the sync loop. Refuses to know anything of
//! pods' specs, and to change anything.
//!
//! ```text
//!  events::Hint ──┐
//!  relist timer ──┼─▶ task ─▶ inspection ─▶ diff ─▶ cache ─▶ dirty pods ─▶ sync loop
//!  pinned inits ──┤             (inspect)  (diff)  (handle)
//!  worker's ask ──┘
//! ```
//!
//! Order is kept by one rule: a snapshot enters only if it was sampled later than the one there. Sample times are
//! this process' monotonic clock, taken before the runtime is asked; clocks of other processes order nothing.

mod convert;
mod death;
mod diff;
mod dirty;
mod exited;
mod handle;
mod inspect;
mod observer;
mod oom;
mod proof;
mod record;
mod relist;
mod task;
mod termination;
#[cfg(test)]
pub(crate) mod testing;

pub use dirty::DirtyPods;
pub use handle::InspectError;
pub use handle::PlegHandle;
pub use observer::NoObserver;
pub use observer::PlegObserver;
pub use task::PlegConfig;
pub use task::start;
pub use termination::with_termination_messages;
