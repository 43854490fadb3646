//! Identity of a process from `/proc`: start time, namespaces, cgroups. Between two reads the process may end and its pid
//! be reused; [`super::pidfd`] excludes that.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::read;

/// Inode number of the host's PID namespace; fixed by the kernel.
const HOST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Start time of a process in clock ticks since boot: field 22 of `stat`.
///
/// The command name in the second field may hold blanks and parentheses, so fields count from the last `)`.
pub fn start_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The process's ids in all PID namespaces it is visible in, outermost first: `NSpid` of `status`.
fn namespace_pids(status: &str) -> Option<Vec<u32>> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().map(|id| id.parse().ok()).collect()
}

/// Thread-group id: `Tgid` of `status`.
fn thread_group(status: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// `/proc` of one process at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFacts {
    /// Start in clock ticks since boot.
    pub start_ticks: u64,
    /// Ids from the outermost visible PID namespace inwards; the last one is its own.
    pub namespace_pids: Vec<u32>,
    /// Thread-group id.
    pub thread_group: u32,
    /// Inode number of its PID namespace; `None` without permission.
    pub pid_namespace: Option<u64>,
    /// Text of `/proc/<pid>/cgroup`.
    pub cgroups: String,
}

impl ProcessFacts {
    /// Reads the files of `pid`.
    ///
    /// # Errors
    /// The process does not exist, or a file is not readable or malformed.
    pub fn read(pid: u32) -> io::Result<Self> {
        let file = |name: &str| read::text(Path::new(&format!("/proc/{pid}/{name}")), read::PROC_FILE_LIMIT);
        let malformed =
            |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/{what} is malformed"));
        let (stat, status) = (file("stat")?, file("status")?);
        Ok(Self {
            start_ticks: start_ticks(&stat).ok_or_else(|| malformed("stat"))?,
            namespace_pids: namespace_pids(&status).ok_or_else(|| malformed("status"))?,
            thread_group: thread_group(&status).ok_or_else(|| malformed("status"))?,
            pid_namespace: std::fs::metadata(format!("/proc/{pid}/ns/pid")).ok().map(|meta| meta.ino()),
            cgroups: file("cgroup")?,
        })
    }

    /// Pid 1 of a PID namespace below the reader's: when it ends, the kernel kills all processes in it.
    pub fn is_pid_ns_init(&self) -> bool {
        self.namespace_pids.len() > 1 && self.namespace_pids.last() == Some(&1)
    }
}

/// Whether this process sees pids as the kernel numbers them.
pub fn in_host_pid_namespace() -> bool {
    std::fs::metadata("/proc/self/ns/pid").is_ok_and(|meta| meta.ino() == HOST_PID_NAMESPACE)
}

/// Clock ticks per second, the unit of start times in `/proc`.
pub fn ticks_per_second() -> u32 {
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
    ticks.and_then(|ticks| u32::try_from(ticks).ok()).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_times_are_parsed_behind_any_command_name() {
        let tail = "S 1 2 3 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 1";
        for name in ["sleep", "a b", ") (", "((x)) S 1"] {
            assert_eq!(start_ticks(&format!("17 ({name}) {tail}")), Some(98765), "{name}");
        }
        assert_eq!(start_ticks("17 (sleep) S 1 2"), None);
        assert_eq!(start_ticks(""), None);
    }

    #[test]
    fn namespaces_are_listed_outermost_first() {
        assert_eq!(namespace_pids("Name:\tx\nTgid:\t9\nNSpid:\t4711\t1\n"), Some(vec![4711, 1]));
        assert_eq!(namespace_pids("NSpid:\tx\n"), None);
        assert_eq!(namespace_pids("Name:\tx\n"), None);
        assert_eq!(thread_group("Name:\tx\nTgid:\t9\n"), Some(9));
    }

    #[test]
    fn init_is_pid_one_of_a_nested_namespace() {
        let facts = |namespace_pids: &[u32]| ProcessFacts {
            start_ticks: 0,
            namespace_pids: namespace_pids.to_vec(),
            thread_group: 1,
            pid_namespace: None,
            cgroups: String::new(),
        };
        assert!(facts(&[4711, 1]).is_pid_ns_init());
        assert!(facts(&[4711, 30, 1]).is_pid_ns_init());
        assert!(!facts(&[4711, 2]).is_pid_ns_init());
        // The host's own init.
        assert!(!facts(&[1]).is_pid_ns_init());
    }

    #[test]
    fn reads_its_own_process() {
        let me = std::process::id();
        let facts = ProcessFacts::read(me).expect("the own process is readable");
        assert_eq!(facts.thread_group, me);
        assert!(facts.start_ticks > 0);
        assert_eq!(facts.namespace_pids.first(), Some(&me));
    }

    #[test]
    fn a_pid_that_cannot_exist_is_not_found() {
        let error = ProcessFacts::read(u32::MAX).expect_err("beyond any pid limit");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
