//! The kernel log as the witness of OOM kills: it names every killed process, and is read independently of any agent.

use std::fs::File;
use std::io::Read as _;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use nix::libc::O_NONBLOCK;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::stamps::monotonic_now;

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
pub(crate) struct KernelLog {
    device: File,
    /// What CLOCK_MONOTONIC is ahead of the log's clock, in nanoseconds.
    ahead: i64,
}

impl KernelLog {
    /// Opens the log behind its last record.
    ///
    /// # Errors
    /// The log cannot be opened, read or written.
    pub(crate) fn open() -> anyhow::Result<Self> {
        let device = File::options().read(true).write(true).custom_flags(O_NONBLOCK).open(DEVICE);
        let mut log = Self { device: device.with_context(|| format!("cannot open {DEVICE}"))?, ahead: 0 };
        while log.record()?.is_some() {}
        log.ahead = log.compare_clocks()?;
        Ok(log)
    }

    /// Writes a record and compares its time with CLOCK_MONOTONIC, from which the log's clock departs by milliseconds an
    /// hour: it is not adjusted.
    fn compare_clocks(&mut self) -> anyhow::Result<i64> {
        let at = monotonic_now()?;
        let mark = format!("keblet-bench compares clocks at {at}");
        // 7: for debugging, so that consoles do not show it.
        let written = self.device.write_all(format!("<7>{mark}\n").as_bytes());
        written.with_context(|| format!("cannot write to {DEVICE}"))?;
        while let Some(record) = self.record()? {
            if let Some((prefix, text)) = record.split_once(';')
                && text.starts_with(&mark)
            {
                let logged = logged_at(prefix).with_context(|| format!("{DEVICE}: no time in {record:?}"))?;
                return Ok(at.cast_signed() - logged.cast_signed());
            }
        }
        bail!("{DEVICE} has no record that was just written to it")
    }

    /// Waits until at least one process was killed, which cancels `killed`, and then until none was for a moment: a group is
    /// killed at once.
    ///
    /// # Errors
    /// None was killed in time, or the log cannot be read.
    pub(crate) async fn kills(
        &mut self,
        limit: Duration,
        settle: Duration,
        killed: &CancellationToken,
    ) -> anyhow::Result<Vec<Kill>> {
        let deadline = Instant::now() + limit;
        let mut kills = Vec::new();
        let mut quiet_since = Instant::now();
        loop {
            while let Some(record) = self.record()? {
                if let Some(kill) = self.kill(&record) {
                    quiet_since = Instant::now();
                    killed.cancel();
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

    /// Waits until each of these processes was killed; returns when, in the same order.
    ///
    /// # Errors
    /// One was not killed in time, or the log cannot be read.
    pub(crate) async fn kills_of(&mut self, pids: &[u32], limit: Duration) -> anyhow::Result<Vec<u64>> {
        let deadline = Instant::now() + limit;
        let mut times = vec![None; pids.len()];
        loop {
            while let Some(record) = self.record()? {
                let Some(kill) = self.kill(&record) else { continue };
                if let Some(index) = pids.iter().position(|pid| *pid == kill.pid) {
                    times[index].get_or_insert(kill.at);
                }
            }
            if let Some(all) = times.iter().copied().collect::<Option<Vec<u64>>>() {
                return Ok(all);
            }
            if Instant::now() > deadline {
                let missing = times.iter().filter(|time| time.is_none()).count();
                let limit = humantime::format_duration(limit);
                bail!("the kernel did not kill {missing} of {} processes within {limit}", pids.len());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The kill that a record reports, by CLOCK_MONOTONIC.
    fn kill(&self, record: &str) -> Option<Kill> {
        let kill = parse(record)?;
        Some(Kill { at: kill.at.saturating_add_signed(self.ahead), ..kill })
    }

    /// The next record; `None` at the end.
    fn record(&mut self) -> anyhow::Result<Option<String>> {
        let mut buffer = [0; RECORD];
        loop {
            match self.device.read(&mut buffer) {
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
/// report of the OOM killer, which is rate-limited. The time is by the log's clock.
fn parse(record: &str) -> Option<Kill> {
    let (prefix, text) = record.split_once(';')?;
    let at = logged_at(prefix)?;
    let (_, rest) = text.split_once("Killed process ")?;
    let (pid, rest) = rest.split_once(" (")?;
    let comm = rest.split_once(") total-vm")?.0.to_owned();
    Some(Kill { at, pid: pid.parse().ok()?, comm })
}

/// The time of a record in nanoseconds, from the part before its text.
fn logged_at(prefix: &str) -> Option<u64> {
    let microseconds: u64 = prefix.split(',').nth(2)?.parse().ok()?;
    microseconds.checked_mul(1000)
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
