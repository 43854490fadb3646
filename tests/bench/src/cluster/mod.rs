//! `keblet-bench cluster`: how soon and how dear node agents are as nodes of a real cluster, side by side in one run.
//!
//! Owns the pods it creates, the Node object of the name it is given, and the agents it starts; touches nothing else of
//! the cluster. Times are those of one observer: from its own call, or the stamp a process writes of its end, to the
//! moment its watch tells. The runtime floor starts and stops the same pods with a bare CRI client.
//!
//! ```text
//!  args ─▶ session ─▶ each round: each column in turn
//!                        │ floor: bare CRI client                       ─┐
//!                        │ agent: node Ready ─▶ burst ─▶ delete ─▶ exits ├─▶ results ─▶ report
//!                        │        ─▶ one-shots     (watch: moments)     ─┘
//!                        └ clean: no agent, no pods, no Node, no sandboxes
//! ```

mod agent;
mod api;
mod args;
mod moments;
mod pods;
mod session;

pub use args::ClusterArgs;
pub use args::ClusterPeer;
pub use args::ClusterWorkload;

use session::Session;

/// Measures, prints and writes the report. Ends by itself; an interrupt ends it early. Either way what it made is
/// removed first.
pub async fn run_cluster(args: ClusterArgs) -> anyhow::Result<()> {
    let mut session = Session::prepare(args).await?;
    let measured = super::until_interrupted(session.measure()).await;
    let cleaned = session.clean_up().await;
    measured?;
    cleaned?;
    super::conclude(&session.into_report())
}
