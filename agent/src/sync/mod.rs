//! The sync loop: dispatches updates of desired pods and changes reported by the PLEG to pod workers. Reconciles mirror
//! pods, which never reach a worker.

mod admit;
mod handlers;
mod housekeeping;
mod kill_requests;
mod mirrors;
mod pod_requests;
mod preemption;
mod resize;
mod shared;
mod task;

pub mod pods;

pub use admit::PodAdmission;
pub use admit::ReadNode;
pub use housekeeping::Housekeeping;
pub use housekeeping::Leftovers;
pub use kill_requests::EvictionSender;
pub use kill_requests::KILL_CAPACITY;
pub use kill_requests::KillRequest;
pub use kill_requests::SyncLoopStopped;
pub use kill_requests::SyncRequests;
pub use mirrors::Mirrors;
pub use preemption::RecordPreemption;
pub use preemption::preemption_reason;
pub use resize::PendingResizes;
pub use shared::SharedPods;
pub use task::SyncLoop;
