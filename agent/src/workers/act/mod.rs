//! Carries out what was decided for a pod: the only code that makes containers, sandboxes and pod cgroups, and that
//! stops and removes them. Short and boring on purpose; decides nothing that `plan` or `generate` could decide.
//!
//! ```text
//!  execute ─▶ kill (pod | containers) ─▶ remove ─▶ ground: network, cgroup, directories, volumes
//!                                                   └─▶ sandbox ─▶ start: image ─▶ config ─▶ create ─▶ start ─▶ prune
//!  turn ─▶ terminate_pod · stop_containers · kill_orphan ─▶ cleanup_pod      the ends of a pod's life
//!  gc                                             what nobody needs any more
//! ```
//!
//! A restart is the path that must be fast: with sandbox, cgroup, directories and image in place it makes two calls to
//! the runtime, CreateContainer and StartContainer, and a few system calls on files in memory.
//!
//! No function here is cancelled half way by its caller: a worker lets a plan run to its end. Only the stop of a whole pod
//! is given up for another one, with a shorter grace period.

mod config;
mod context;
mod env_objects;
mod finish;
pub mod gc;
mod grace;
mod ground;
mod image;
mod kill;
mod remove;
mod report;
mod run;
mod sandbox;
mod start;
#[cfg(test)]
mod tests;
mod turn;
mod volumes;

pub use context::ActContext;
pub use context::NodeFiles;
pub use finish::cleanup_orphan;
pub use finish::cleanup_pod;
pub use finish::kill_orphan;
pub use finish::release_volumes;
pub use finish::remove_content;
pub use finish::stop_containers;
pub use finish::terminate_pod;
pub use grace::blocking_kill_limit;
pub use grace::grace_period;
pub use run::execute;
pub use volumes::refresh as refresh_volumes;
pub use volumes::retry_after as retry_volumes_after;
