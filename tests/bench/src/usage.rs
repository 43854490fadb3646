//! CPU time and memory of a process, from `/proc`.

use std::time::Duration;

use anyhow::Context as _;
use nix::unistd::SysconfVar;
use nix::unistd::sysconf;

/// CPU time of a process since its start: all threads, user and system.
pub(crate) fn cpu_time(pid: u32) -> anyhow::Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let ticks = ticks(&stat).with_context(|| format!("{path} is malformed"))?;
    let per_second = sysconf(SysconfVar::CLK_TCK)?.context("the kernel's tick is unknown")?;
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}

/// `utime` and `stime`, fields 14 and 15. The name in field 2 may contain anything, parentheses included.
fn ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Resident memory of a process, in MiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Resident {
    /// All of it: `VmRSS`.
    pub(crate) total: f64,
    /// What is not backed by files, and cannot be reclaimed without swap: `RssAnon`.
    pub(crate) anonymous: f64,
}

/// Reads the resident memory of a process.
///
/// # Errors
/// The process exited, or its status has no such lines.
pub(crate) fn resident(pid: u32) -> anyhow::Result<Resident> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let read = |key| kilobytes(&status, key).with_context(|| format!("{path} has no {key}"));
    let mebibytes = |kilobytes: u64| kilobytes as f64 / 1024.0;
    Ok(Resident { total: mebibytes(read("VmRSS:")?), anonymous: mebibytes(read("RssAnon:")?) })
}

fn kilobytes(status: &str, key: &str) -> Option<u64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(key))?;
    rest.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_stat() {
        let stat = "42 (a) b) S 1 42 42 0 -1 4194560 1 2 3 4 150 25 0 0 20 0 9 0 100 1 2 3";
        assert_eq!(ticks(stat), Some(175));
        assert_eq!(ticks("42 (a"), None);
    }

    #[test]
    fn fields_of_status() {
        assert_eq!(kilobytes("VmHWM:\t  9 kB\nVmRSS:\t  1234 kB\n", "VmRSS:"), Some(1234));
        assert_eq!(kilobytes("Name:\tkthread\n", "VmRSS:"), None);
    }

    #[test]
    fn this_process_is_readable() {
        let pid = std::process::id();
        let resident = resident(pid).unwrap();
        assert!(resident.total > resident.anonymous && resident.anonymous > 0.1, "{resident:?}");
        let before = cpu_time(pid).unwrap();
        let end = std::time::Instant::now() + Duration::from_millis(50);
        while std::time::Instant::now() < end {}
        assert!(cpu_time(pid).unwrap() > before);
    }
}
