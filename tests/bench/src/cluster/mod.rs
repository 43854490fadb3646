//! `keblet-bench cluster`: node agents as nodes of a real cluster, side by side in one run.
//!
//! Owns the pods it creates, the Node object with the given name, and the agents it starts; changes nothing else in the
//! cluster. Times are measured by one observer: from its own request, or the stamp that a process writes, until its
//! watch delivers the change. The bare client makes the same CRI calls for the same pods.
//!
//! ```text
//!  args ─▶ session ─▶ each run: one participant after the other
//!                        │ bare_client: startup · delete · exit · restart · chains · churn · density ─┐
//!                        │ agent: node Ready ─▶ the same parts · probed · rollout · volumes · resize  │
//!                        │                      · oom · exit_flood   (watch: observed)                ├─▶ results
//!                        │ new agent: density ─▶ idle                                                 │
//!                        │ new agent: probed pods ─▶ idle                                             ┘
//!                        └ sweep: no agent, no pods, no Node, no sandboxes
//! ```

mod api;
mod args;
mod bare_client;
mod bench_node;
mod churn;
mod exit_flood;
mod observed;
mod oom;
mod parts;
mod probed;
mod remains;
mod resize;
mod rollout;
mod session;
mod volumes;

pub use args::ClusterArgs;
pub use args::Part;

pub(crate) use api::ClusterClient;
pub(crate) use observed::ObservedPods;
pub(crate) use observed::PodTimes;

use session::Session;

/// Measures, prints and writes the report. SIGINT and SIGTERM stop it early; its resources are removed either way.
///
/// # Errors
/// Something needed is missing, a participant failed, or the report cannot be written.
pub async fn run_cluster(args: ClusterArgs) -> anyhow::Result<()> {
    let mut session = Session::prepare(args).await?;
    let measured = crate::until_interrupted(session.measure()).await;
    let cleaned = session.clean_up().await;
    measured?;
    cleaned?;
    session.into_report().conclude()
}
