//! The words every room shares: identities, what the runtime said of a pod, what happened to it, what shall be
//! done about it, and the clock. Plain data and pure functions; no I/O, no tokio tasks, no policy.

mod actions;
mod clock;
mod desired;
pub mod downward;
mod hash;
mod ids;
mod lifecycle;
mod outcome;
mod quantity;
pub mod quote;
pub mod restart;
mod sandbox;
mod snapshot;
pub mod spec;
#[cfg(test)]
pub mod testing;

pub use actions::Blocked;
pub use actions::ContainerClass;
pub use actions::KillContainer;
pub use actions::KillReason;
pub use actions::PodActions;
pub use actions::RemoveContainer;
pub use actions::SandboxPlan;
pub use actions::StartContainer;
pub use clock::Clock;
pub use desired::ConfigSource;
pub use desired::Pod;
pub use desired::PodUpdate;
pub use desired::pod_ref;
pub use downward::DownwardError;
pub use hash::container_hash;
pub use hash::fnv1a_64;
pub use ids::ContainerId;
pub use ids::PodRef;
pub use ids::PodUid;
pub use ids::SandboxId;
pub use lifecycle::KernelMoment;
pub use lifecycle::LifecycleEvent;
pub use lifecycle::LifecycleKind;
pub use lifecycle::Source;
pub use outcome::StartFailure;
pub use outcome::StartOutcome;
pub use outcome::SyncOutcome;
pub use quantity::Amount;
pub use quantity::QuantityError;
pub use sandbox::SandboxNeed;
pub use snapshot::ContainerState;
pub use snapshot::ContainerStatus;
pub use snapshot::PodSnapshot;
pub use snapshot::ProvenDeath;
pub use snapshot::SandboxStatus;
pub use snapshot::TerminationFile;
