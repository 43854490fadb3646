//! Graceful node shutdown (KEP-2000, KEP-2712): pods are terminated by priority, each group within its period.
//!
//! Holds the inhibitor lock, orders the pods and enforces the periods. Pods are terminated through [`PodTerminator`].
//!
//! ```text
//!  logind: PrepareForShutdown ─▶ task ─▶ node NotReady, no new pods, state file
//!                                  │      plan: groups by priority, lowest first (pure)
//!                                  ├─▶ end the pods of a group, wait at most its time
//!                                  └─▶ release the lock: the machine shuts down
//! ```

mod file;
mod logind;
mod plan;
mod task;
#[cfg(test)]
mod tests;

pub use file::StateFile;
pub use logind::Logind;
pub use logind::LogindError;
pub use plan::Group;
pub use plan::groups;
pub use task::Down;
pub use task::PodTerminator;
pub use task::Shutdown;
