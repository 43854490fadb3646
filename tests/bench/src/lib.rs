//! `keblet-bench pleg`: how fast and how dear node agents are on a real runtime, side by side in one run; in `cluster`
//! the same for nodes of a real cluster.
//!
//! Owns the measurement: the pods it makes, the bare clients (floors) it compares with, the agents it starts, and what
//! is reported. Refuses to judge by its own watch where the containers can tell: times of processes are the stamps that
//! the processes themselves write. It touches only pods that carry its label and removes them through CRI, for what is
//! removed behind CRI's back looks like a crash loop to the next agent.
//!
//! ```text
//!  args ─▶ session ─▶ each round: each workload: each column in turn
//!                        │ floor: bare CRI client     ─┐
//!                        │ agent: a child process      ├─▶ stamps, usage ─▶ results ─▶ report
//!                        └ site: clean before and after┘
//! ```

mod agent;
mod args;
mod cluster;
mod column;
mod common;
mod exposition;
mod floor;
mod folder;
mod manifest;
mod report;
mod results;
mod session;
mod site;
mod stamps;
mod targets;
mod usage;
mod workload;

pub use args::Peer;
pub use args::PlegArgs;
pub use args::WorkloadKind;
pub use cluster::ClusterArgs;
pub use cluster::ClusterPeer;
pub use cluster::ClusterWorkload;
pub use cluster::run_cluster;
pub use common::CommonArgs;

use anyhow::Context as _;
use anyhow::bail;
use session::Session;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;

/// Measures, prints and writes the report. Ends by itself; an interrupt ends it early. Either way what it made is
/// removed first.
pub async fn run_pleg(args: PlegArgs) -> anyhow::Result<()> {
    let mut session = Session::prepare(args).await?;
    let measured = until_interrupted(session.measure()).await;
    let cleaned = session.clean_up().await;
    measured?;
    cleaned?;
    conclude(&session.into_report())
}

/// Does the work, unless it is interrupted.
async fn until_interrupted(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    tokio::select! {
        done = work => done,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow::anyhow!("told to end")),
    }
}

/// Prints and writes the report; an error if it was to be checked and is not good.
fn conclude(report: &report::Report) -> anyhow::Result<()> {
    report::write(report)?;
    if report.check && !report.is_good() {
        bail!("a target was missed or a pod went wrong, see above");
    }
    Ok(())
}
