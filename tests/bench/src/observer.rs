//! CPU time and memory of `keblet observe` beside an agent whose pods are idle.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use keblet::runtime::RuntimeEndpoint;
use tokio::process::Command;

use super::metric::Metric;
use super::results::Results;
use super::results::Series;
use super::usage;

/// Time for the observer to read the node.
const SETTLE: Duration = Duration::from_secs(10);

/// Runs `keblet observe --json` with its defaults beside an agent for `time`.
///
/// # Errors
/// It cannot be started, or exited.
pub(crate) async fn measure(
    results: &mut Results,
    participant: &str,
    keblet: &Path,
    endpoint: &RuntimeEndpoint,
    folder: &Path,
    time: Duration,
) -> anyhow::Result<()> {
    let log = folder.join("observe.log");
    let log = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
    let mut command = Command::new(keblet);
    command.args(["observe", "--json", "--container-runtime-endpoint", &endpoint.to_string()]);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).kill_on_drop(true);
    let mut observer = command.spawn().with_context(|| format!("cannot start {} observe", keblet.display()))?;
    let pid = observer.id().context("keblet observe has no process id")?;
    tokio::time::sleep(SETTLE).await;
    let before = usage::cpu_time(pid)?;
    tokio::time::sleep(time).await;
    if let Some(status) = observer.try_wait()? {
        bail!("keblet observe exited: {status}");
    }
    let spent = usage::cpu_time(pid)?.saturating_sub(before);
    let per_minute = spent.as_secs_f64() / (time.as_secs_f64() / 60.0);
    results.add(Metric::ObserveCpu, participant, Series::Values(vec![per_minute]));
    results.add(Metric::ObserveRss, participant, Series::Values(vec![usage::resident(pid)?.total]));
    observer.kill().await.context("cannot stop keblet observe")
}
