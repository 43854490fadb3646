//! The eviction manager: evicts pods when memory, disk space or process ids of the node run short, and pods that exceed
//! their limits on files.
//!
//! ```text
//!  cgroups · statfs · /proc ─▶ observe ─▶ readings ─▶ history ─▶ conditions of the node ─▶ Node status, admission
//!  PSI ─▶ wake                                           └─▶ thresholds to act on
//!                                                             ├─▶ relief of a disk: dead containers, unused images
//!  stats (only then) ─▶ usage of pods ─▶ ranking ─▶ decision ─┴─▶ one pod: event, status, termination; wait for its end
//!  sizes of volumes, at bounded cost ─▶ local_limits ─▶ recount ─▶
//!  counters of pressure ─▶ pressure::Tracker ─▶ policies ────────▶
//! ```
//!
//! Decisions are pure: the same thresholds, readings and pods give the same victim, which recorded traces show. Only
//! `observe`, `pods` and `journal` access the node. Taints are set by the control plane.

mod decision;
mod history;
mod image_fs_retry;
mod journal;
mod local_limits;
mod manager;
mod message;
mod observe;
mod pace;
mod pods;
mod policies;
mod ranking;
mod readings;
mod recount;
mod relief;
mod resume;
#[cfg(test)]
mod tests;
mod writer;

pub use decision::Reclaim;
pub use journal::Journal;
pub use local_limits::Needs;
pub use manager::Manager;
pub use manager::Parts;
pub use manager::Policy;
pub use observe::Garbage;
pub use observe::Observe;
pub use observe::Sources;
pub use observe::ThisNode;
pub use pods::NodePods;
pub use readings::DiskLayout;
pub use readings::Reading;
pub use readings::Readings;
