//! Executes what was decided for a pod: the only code that makes, stops and removes containers, sandboxes and pod cgroups.
//! Decides nothing that `plan` or `generate` can decide.
//!
//! ```text
//!  execute ─▶ prerequisites: network, cgroup, directories, volumes
//!          ─▶ kill (pod | containers) ─▶ remove ─▶ resize ─▶ sandbox ─▶ start: image ─▶ config ─▶ create ─▶ start ─▶ postStart ─▶ prune
//!  pod_termination: terminate_pod · stop_containers · kill_orphan ─▶ cleanup_pod ─▶ remove_content
//!  orphans: remove_orphan · gc: garbage collection
//! ```
//!
//! A container restart is the path that must be fast: with sandbox, cgroup, directories and image in place it makes two
//! calls to the runtime, CreateContainer and StartContainer, and a few system calls on files in memory.
//!
//! A worker does not cancel these functions. Only the stop of a whole pod is dropped, for another with a shorter grace
//! period.

mod cause;
mod config;
mod context;
mod env_objects;
mod error;
pub mod gc;
mod grace;
mod hooks;
mod image;
mod image_volumes;
mod kill;
mod orphans;
mod outcome;
mod pass;
mod pod_termination;
mod prefetch;
mod prerequisites;
mod pull_secrets;
mod remove;
mod report;
mod resize;
mod run;
mod sandbox;
mod start;
mod termination_order;
#[cfg(test)]
mod tests;
mod user_namespace;
mod volumes;

pub use cause::Cause;
pub use context::ActContext;
pub use context::ActServices;
pub use context::NodeFiles;
pub use error::PodError;
pub use error::Rendered;
pub use error::joined;
pub use grace::blocking_kill_limit;
pub use grace::grace_period;
pub use grace::runtime_kill_limit;
pub use hooks::HookError;
pub use hooks::HookFailure;
pub use orphans::remove_orphan;
pub use outcome::SyncOutcome;
pub use pass::PassContext;
pub use pod_termination::TerminationOptions;
pub use pod_termination::cleanup_orphan;
pub use pod_termination::cleanup_pod;
pub use pod_termination::kill_orphan;
pub use pod_termination::release_volumes;
pub use pod_termination::remove_content;
pub use pod_termination::stop_containers;
pub use pod_termination::terminate_pod;
pub use resize::ResizeError;
pub use run::execute;
pub use run::execute_observed;
pub use volumes::refresh as refresh_volumes;
pub use volumes::retry_after as retry_volumes_after;
