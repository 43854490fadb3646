//! The kernel log as the witness of OOM kills: it names every killed process, and is read independently of any agent.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use nix::libc::O_NONBLOCK;
use tokio::time::Instant;

const DEVICE: &str = "/dev/kmsg";
/// The kernel returns one record for each read and fails if it does not fit.
const RECORD: usize = 8 << 10;
const POLL: Duration = Duration::from_millis(5);

/// A killed process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kill {
    /// When it was logged, in nanoseconds of CLOCK_MONOTONIC, with a resolution of microseconds.
    pub(crate) at: u64,
    pub(crate) pid: u32,
    pub(crate) comm: String,
}

/// Reads kills from the kernel log, from the time of its opening.
#[derive(Debug)]
pub(crate) struct KernelLog(File);

impl KernelLog {
    /// Opens the log behind its last record.
    ///
    /// # Errors
    /// The log cannot be opened or read.
    pub(crate) fn open() -> anyhow::Result<Self> {
        let options = File::options().read(true).custom_flags(O_NONBLOCK).open(DEVICE);
        let mut log = Self(options.with_context(|| format!("cannot open {DEVICE}"))?);
        while log.record()?.is_some() {}
        Ok(log)
    }

    /// Waits until at least one process was killed, and then until none was for a moment: a group is killed at once.
    ///
    /// # Errors
    /// None was killed in time, or the log cannot be read.
    pub(crate) async fn kills(&mut self, limit: Duration, settle: Duration) -> anyhow::Result<Vec<Kill>> {
        let deadline = Instant::now() + limit;
        let mut kills = Vec::new();
        let mut quiet_since = Instant::now();
        loop {
            while let Some(record) = self.record()? {
                if let Some(kill) = parse(&record) {
                    quiet_since = Instant::now();
                    // The chosen process of a group is logged once as such, and once more with its group.
                    if kills.iter().all(|known: &Kill| known.pid != kill.pid) {
                        kills.push(kill);
                    }
                }
            }
            if !kills.is_empty() && quiet_since.elapsed() > settle {
                return Ok(kills);
            }
            if kills.is_empty() && Instant::now() > deadline {
                bail!("the kernel killed no process within {}", humantime::format_duration(limit));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The next record; `None` at the end.
    fn record(&mut self) -> anyhow::Result<Option<String>> {
        let mut buffer = [0; RECORD];
        loop {
            match self.0.read(&mut buffer) {
                Ok(length) => return Ok(Some(String::from_utf8_lossy(&buffer[..length]).into_owned())),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(None),
                // Records were overwritten before they were read; the next read continues behind them.
                Err(error) if error.raw_os_error() == Some(nix::libc::EPIPE) => {}
                Err(error) => return Err(error).with_context(|| format!("cannot read {DEVICE}")),
            }
        }
    }
}

/// `PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;... Killed process PID (NAME) ...`, which is logged for every victim, unlike the
/// report of the OOM killer, which is rate-limited.
fn parse(record: &str) -> Option<Kill> {
    let (prefix, text) = record.split_once(';')?;
    let microseconds: u64 = prefix.split(',').nth(2)?.parse().ok()?;
    let (_, rest) = text.split_once("Killed process ")?;
    let (pid, rest) = rest.split_once(" (")?;
    let comm = rest.split_once(") total-vm")?.0.to_owned();
    Some(Kill { at: microseconds * 1000, pid: pid.parse().ok()?, comm })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kills_are_parsed() {
        let kill =
            "3,812,45123456,-;Memory cgroup out of memory: Killed process 4711 (a (b)) total-vm:1kB, anon-rss:2kB\n";
        assert_eq!(parse(kill), Some(Kill { at: 45_123_456_000, pid: 4711, comm: "a (b)".to_owned() }));
        let node = "3,9,7,c;Out of memory: Killed process 12 (probe) total-vm:1kB, anon-rss:2kB\n";
        assert_eq!(parse(node).unwrap().pid, 12);
        for other in ["6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,task=probe,pid=4711,uid=0\n", "nonsense", ""] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
