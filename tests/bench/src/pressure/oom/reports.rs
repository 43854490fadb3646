//! Reads what an agent reports while it runs: lines of its log, and the statuses of its pods.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;
use tokio::time::Instant;

use super::judge::Report;
use crate::agent::Agent;
use crate::pressure::kernel_log::Kill;
use crate::stamps::monotonic_now;

/// Poll interval of the log file, which bounds the error of a latency.
const LOG_POLL: Duration = Duration::from_millis(2);
/// Poll interval of the statuses, each of which is a request to the agent.
const STATUS_POLL: Duration = Duration::from_millis(20);
/// Many times what a report takes in emulation.
const GRACE: Duration = Duration::from_secs(1);

/// The terminated state of a container.
#[derive(Debug)]
pub(super) struct Terminated {
    pub(super) reason: String,
    /// When it was seen, in nanoseconds of CLOCK_MONOTONIC.
    pub(super) seen: u64,
}

/// The log of an agent.
#[derive(Debug)]
pub(super) struct Log {
    file: File,
    partial: String,
    reports: Vec<Report>,
}

impl Log {
    /// Opens the log file of a started agent.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(super) fn open(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join("agent.log");
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { file, partial: String::new(), reports: Vec::new() })
    }

    /// What was read so far.
    pub(super) fn reports(&self) -> &[Report] {
        &self.reports
    }

    /// Reads the log while `work` runs, so that it is known when each report appeared.
    ///
    /// # Errors
    /// Those of `work`; the log cannot be read.
    pub(super) async fn during<T>(&mut self, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        let mut work = pin!(work);
        loop {
            self.read()?;
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep(LOG_POLL) => {}
            }
        }
    }

    /// Waits until one of the kills is reported, or the time has passed. An agent that has reported no kill so far may be one
    /// that never does, as a kubelet: its report is waited for only until the container has `ended`, and for a moment more.
    ///
    /// # Errors
    /// The log cannot be read.
    pub(super) async fn until_reported(
        &mut self,
        kills: &[Kill],
        time: Duration,
        ended: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + time;
        let mut enough = pin!(async {
            ended.await;
            tokio::time::sleep(GRACE).await;
        });
        let mut is_enough = false;
        loop {
            self.read()?;
            let is_reported = |report: &Report| kills.iter().any(|kill| kill.pid == report.pid);
            let gives_up = Instant::now() > deadline || (is_enough && self.reports.is_empty());
            if gives_up || self.reports.iter().any(is_reported) {
                return Ok(());
            }
            tokio::select! {
                () = &mut enough, if !is_enough => is_enough = true,
                () = tokio::time::sleep(LOG_POLL) => {}
            }
        }
    }

    fn read(&mut self) -> anyhow::Result<()> {
        let mut bytes = Vec::new();
        self.file.read_to_end(&mut bytes).context("cannot read the agent's log")?;
        if bytes.is_empty() {
            return Ok(());
        }
        let seen = monotonic_now()?;
        self.partial.push_str(&String::from_utf8_lossy(&bytes));
        let complete = self.partial.rfind('\n').map_or(0, |end| end + 1);
        let lines: String = self.partial.drain(..complete).collect();
        self.reports.extend(lines.lines().filter_map(|line| Report::parse(line, seen)));
        Ok(())
    }
}

/// Waits for the terminated state of a static pod's container; `None` if it has none in time.
///
/// # Errors
/// The agent serves no pods.
pub(super) async fn terminated(agent: &Agent, pod: &str, time: Duration) -> anyhow::Result<Option<Terminated>> {
    let deadline = Instant::now() + time;
    loop {
        let status = status(agent, pod).await?;
        if let Some(reason) = status["state"]["terminated"]["reason"].as_str() {
            return Ok(Some(Terminated { reason: reason.to_owned(), seen: monotonic_now()? }));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        tokio::time::sleep(STATUS_POLL).await;
    }
}

/// The status of the only container of a static pod; null if there is none.
async fn status(agent: &Agent, pod: &str) -> anyhow::Result<Value> {
    let list = agent.pods().await?;
    let prefix = format!("{pod}-");
    let items = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = items.iter().find(|item| item["metadata"]["name"].as_str().is_some_and(|n| n.starts_with(&prefix)));
    Ok(found.map(|item| item["status"]["containerStatuses"][0].clone()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::future::ready;
    use std::path::PathBuf;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn kill(pid: u32) -> Kill {
        Kill { at: 1, pid, comm: "probe".to_owned() }
    }

    /// An agent that has logged nothing yet.
    struct Logging {
        _folder: tempfile::TempDir,
        file: PathBuf,
        log: Log,
    }

    impl Logging {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("agent.log");
            std::fs::write(&file, "").unwrap();
            let log = Log::open(folder.path()).unwrap();
            Self { _folder: folder, file, log }
        }

        /// How long the report of a kill is waited for.
        async fn waits(&mut self, pid: u32, ended: impl Future<Output = ()>) -> Duration {
            let start = Instant::now();
            self.log.until_reported(&[kill(pid)], LIMIT, ended).await.unwrap();
            start.elapsed()
        }
    }

    fn report(file: &Path, pid: u32) {
        std::fs::write(file, format!("{{\"event\":\"OomKilled\",\"pid\":{pid}}}\n")).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_reports_nothing_is_waited_for_until_the_status_and_a_moment_more() {
        let mut kubelet = Logging::new();
        let at_once = kubelet.waits(8, ready(())).await;
        assert!((GRACE..GRACE * 2).contains(&at_once), "{at_once:?}");
        let status = Duration::from_secs(3);
        let later = kubelet.waits(8, tokio::time::sleep(status)).await;
        assert!((status + GRACE..status + GRACE * 2).contains(&later), "{later:?}");
        assert!(kubelet.waits(8, pending()).await >= LIMIT, "there is no status either");
        assert!(kubelet.log.reports().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_has_reported_a_kill_has_all_the_time_for_the_next_one() {
        let mut keblet = Logging::new();
        report(&keblet.file, 8);
        assert_eq!(keblet.waits(8, pending()).await, Duration::ZERO);
        assert!(keblet.waits(9, ready(())).await >= LIMIT);
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_is_seen_when_it_appears_and_not_after_the_kernel_log_is_read() {
        let Logging { _folder, file, mut log } = Logging::new();
        let work = async {
            report(&file, 8);
            tokio::time::sleep(LOG_POLL * 5).await;
            monotonic_now()
        };
        let end = log.during(work).await.unwrap();
        assert!(log.reports().iter().any(|report| report.pid == 8 && report.seen <= end), "{:?}", log.reports());
        let error = log.during(async { anyhow::Result::<()>::Err(anyhow::anyhow!("no kill")) }).await;
        assert_eq!(error.unwrap_err().to_string(), "no kill");
    }
}
