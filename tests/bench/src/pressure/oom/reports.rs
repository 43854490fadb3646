//! Reads what an agent reports while it runs: lines of its log, and the statuses of its pods.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
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

    /// Waits until one of the kills is reported, or the time has passed.
    ///
    /// # Errors
    /// The log cannot be read.
    pub(super) async fn until_reported(&mut self, kills: &[Kill], time: Duration) -> anyhow::Result<&[Report]> {
        let deadline = Instant::now() + time;
        loop {
            self.read()?;
            let is_reported = |report: &Report| kills.iter().any(|kill| kill.pid == report.pid);
            if self.reports.iter().any(is_reported) || Instant::now() > deadline {
                return Ok(&self.reports);
            }
            tokio::time::sleep(LOG_POLL).await;
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

/// Waits for the terminated state of a static pod's container: its reason, and when it was seen.
///
/// # Errors
/// The agent serves no pods.
pub(super) async fn terminated(agent: &Agent, pod: &str, time: Duration) -> anyhow::Result<Option<(String, u64)>> {
    let deadline = Instant::now() + time;
    loop {
        let status = status(agent, pod).await?;
        if let Some(reason) = status["state"]["terminated"]["reason"].as_str() {
            return Ok(Some((reason.to_owned(), monotonic_now()?)));
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
