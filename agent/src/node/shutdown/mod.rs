//! Graceful node shutdown (KEP-2000, KEP-2712): pods end by priority, each group within its time, before the machine
//! goes down.
//!
//! Owns the lock that delays the shutdown, the order of the pods and the deadlines. Refuses to stop containers: it asks
//! whoever runs pods to end them, and waits.
//!
//! ```text
//!  logind: PrepareForShutdown ─▶ task ─▶ node NotReady, no new pods, state file
//!                                  │      plan: groups by priority, lowest first (pure)
//!                                  ├─▶ end the pods of a group, wait at most its time
//!                                  └─▶ give the lock back: the machine goes down
//! ```

mod file;
mod logind;
mod plan;
mod task;
#[cfg(test)]
mod tests;

pub use logind::Logind;
pub use logind::LogindError;
pub use plan::Group;
pub use plan::groups;
pub use task::Down;
pub use task::PodTerminator;
pub use task::Shutdown;
