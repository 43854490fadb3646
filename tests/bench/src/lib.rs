//! `keblet-bench`: measures node agents side by side on a real runtime, alone (`pleg`), as nodes of a real cluster
//! (`cluster`), or when memory runs out (`pressure`).
//!
//! Owns the pods it creates, the bare CRI clients that agents are compared with, the agents it starts, and the reports.
//! Times of processes are stamps that the processes write themselves. It changes only pods with its label and removes
//! them through CRI: pods that are removed without CRI look like crash loops to the next agent.
//!
//! ```text
//!  args ─▶ session ─▶ each run: one participant after the other
//!                        │ bare client                 ─┐
//!                        │ agent: a child process       ├─▶ stamps, watches, /proc ─▶ results ─▶ report
//!                        └ sweep before and after      ─┘
//! ```

mod agent;
mod bare_client;
mod cluster;
mod common;
mod exposition;
mod flood;
mod folder;
mod idle;
mod manifest;
mod metric;
mod observer;
mod participant;
mod pleg;
mod pressure;
mod report;
mod results;
mod runtime_pods;
mod scrape;
mod stamps;
mod usage;
mod workload;

pub use cluster::ClusterArgs;
pub use cluster::Part;
pub use cluster::run_cluster;
pub use common::CommonArgs;
pub use common::Peer;
pub use common::Variant;
pub use flood::FloodArgs;
pub use flood::run_flood;
pub use pleg::PlegArgs;
pub use pleg::WorkloadKind;
pub use pleg::run_pleg;
pub use pressure::ClusterAccess;
pub use pressure::PressureArgs;
pub use pressure::PressurePart;
pub use pressure::run_pressure;
pub use report::merge;

use anyhow::Context as _;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;

/// Runs the work until it completes or SIGINT or SIGTERM arrives.
async fn until_interrupted(work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    tokio::select! {
        done = work => done,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted by SIGINT")),
        _ = terminate.recv() => Err(anyhow::anyhow!("interrupted by SIGTERM")),
    }
}
