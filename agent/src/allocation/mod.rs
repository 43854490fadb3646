//! Resources of pods: what was allocated to them, what was applied, and how far resizes are (KEP-1287, KEP-5419).
//!
//! ```text
//!  desired (source) ─▶ sync loop: is there room? ─▶ allocated ─▶ pod worker ─▶ applied (actuated)
//!                          │ no                        │ file        │ error       │ file
//!                          └─▶ PodResizePending        └─▶ PodResizeInProgress ◀───┘ equal: removed
//! ```
//!
//! [`Allocations`] holds both records with their files, and the conditions. The sync loop alone allocates, the pod's worker
//! alone records what it applied.

mod checkpoint;
mod conditions;
mod feasibility;
mod lost;
mod queue;
mod records;
mod report;
mod store;

pub use checkpoint::CheckpointError;
pub use conditions::Pending;
pub use feasibility::Class;
pub use feasibility::Infeasible;
pub use feasibility::ResizeGates;
pub use feasibility::ResizePolicy;
pub use feasibility::infeasible;
pub use queue::Queue;
pub use queue::Rank;
pub use queue::Waits;
pub use report::report;
pub use store::Allocations;
pub use store::OpenError;
pub use store::Progress;
