//! `keblet-bench pleg`: agents with static pods on a private runtime, without an API server.

mod args;
mod session;

pub use args::PlegArgs;
pub use args::WorkloadKind;

use session::Session;

/// Measures, prints and writes the report. SIGINT and SIGTERM stop it early; pods and files are removed either way.
///
/// # Errors
/// A prerequisite is missing, a participant failed, or the report cannot be written.
pub async fn run_pleg(args: PlegArgs) -> anyhow::Result<()> {
    let mut session = Session::prepare(args).await?;
    let measured = crate::until_interrupted(session.measure()).await;
    let cleaned = session.clean_up().await;
    measured?;
    cleaned?;
    session.into_report().conclude()
}
