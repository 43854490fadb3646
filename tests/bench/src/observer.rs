//! CPU time and memory of `keblet observe` beside an agent whose pods are idle.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use keblet::runtime::RuntimeEndpoint;
use tokio::process::Child;
use tokio::process::Command;

use super::metric::Metric;
use super::results::Results;
use super::results::Series;
use super::usage;

/// Time for the observer to read the node.
const SETTLE: Duration = Duration::from_secs(10);

/// A running `keblet observe --json` with its defaults. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Observer {
    child: Child,
    pid: u32,
}

impl Observer {
    /// Starts it; its output goes to a file in `folder`.
    ///
    /// # Errors
    /// The file cannot be created, or the program cannot be started.
    pub(crate) fn start(keblet: &Path, endpoint: &RuntimeEndpoint, folder: &Path) -> anyhow::Result<Self> {
        let log = folder.join("observe.log");
        let log = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let mut command = Command::new(keblet);
        command.args(["observe", "--json", "--container-runtime-endpoint", &endpoint.to_string()]);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).kill_on_drop(true);
        let child = command.spawn().with_context(|| format!("cannot start {} observe", keblet.display()))?;
        let pid = child.id().context("keblet observe has no process id")?;
        Ok(Self { child, pid })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Fails if it has exited.
    ///
    /// # Errors
    /// It has.
    pub(crate) fn check_running(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait().context("cannot wait for keblet observe")? {
            None => Ok(()),
            Some(status) => bail!("keblet observe exited: {status}"),
        }
    }

    /// Ends it.
    ///
    /// # Errors
    /// It cannot be signalled.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.child.kill().await.context("cannot stop keblet observe")
    }
}

/// Runs it beside an agent for `time`.
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
    let mut observer = Observer::start(keblet, endpoint, folder)?;
    let pid = observer.pid();
    tokio::time::sleep(SETTLE).await;
    let before = usage::cpu_time(pid)?;
    tokio::time::sleep(time).await;
    observer.check_running()?;
    let spent = usage::cpu_time(pid)?.saturating_sub(before);
    let per_minute = spent.as_secs_f64() / (time.as_secs_f64() / 60.0);
    results.add(Metric::ObserveCpu, participant, Series::Values(vec![per_minute]));
    results.add(Metric::ObserveRss, participant, Series::Values(vec![usage::resident(pid)?.total]));
    observer.stop().await
}
