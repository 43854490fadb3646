//! Pod lifecycle event generation: the sole writer of the pod cache.
//!
//! Hints select pods to inspect; an inspection or a relist yields a snapshot; exits proven by the kernel are applied to it.
//! Differences to the cached snapshot become lifecycle events and wake the sync loop. Reads no pod spec and changes
//! nothing on the node.
//!
//! ```text
//!  events::Hint ──┐
//!  relist timer ──┼─▶ task ─▶ inspection ─▶ diff ─▶ cache ─▶ dirty pods ─▶ sync loop
//!  pidfds ────────┤             (inspect)  (diff)  (handle)
//!  workers ───────┘
//! ```
//!
//! A snapshot enters the cache only if it was sampled later than the cached one. Sample times are taken from this process'
//! monotonic clock before the runtime is called; time stamps of other processes are not compared.

mod convert;
mod diff;
mod dirty;
mod exit_code;
mod exited;
mod handle;
mod inspect;
mod observer;
mod oom;
mod owners;
mod proof;
mod proven_exits;
mod record;
mod relist;
mod report;
mod task;
mod termination;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod uninspected;

pub use dirty::DirtyPods;
pub use handle::InspectError;
pub use handle::PlegHandle;
pub use observer::PlegObserver;
pub use task::PlegConfig;
pub use task::start;
pub use termination::MessageSource;
pub use termination::TerminationMessages;
