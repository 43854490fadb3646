//! `keblet-bench pressure`: what agents report of OOM kills, and how they act when memory runs short. Runs on cgroup v2,
//! on a machine that may run out of memory: the virtual machine of `cargo xtask vm`.
//!
//! ```text
//! oom/case.rs   which process is to be killed, and whose limit does it
//! oom/driver.rs pods, limits and triggers ─▶ kills
//! kernel_log.rs what the kernel did         ─┐
//! oom/reports.rs what the agent says of it  ─┴▶ oom/judge.rs ─▶ oom/matrix.rs
//! race.rs       a pod that grows towards an eviction threshold, as a node of a cluster
//! thrash/       a pod that stalls the node, as a node of a cluster
//! ```

mod args;
mod cgroups;
mod cluster_node;
mod kernel_log;
mod node;
mod oom;
mod race;
mod session;
mod thrash;

pub use args::ClusterAccess;
pub use args::PressureArgs;
pub use args::PressurePart;

pub(crate) use kernel_log::KernelLog;

use session::Session;

/// Measures, prints and writes the report. SIGINT and SIGTERM stop it early; pods and files are removed either way.
///
/// # Errors
/// A prerequisite is missing, a participant failed, or the report cannot be written.
pub async fn run_pressure(args: PressureArgs) -> anyhow::Result<()> {
    let mut session = Session::prepare(args).await?;
    let measured = crate::until_interrupted(session.measure()).await;
    let cleaned = session.clean_up().await;
    measured?;
    cleaned?;
    session.into_report().conclude()
}
