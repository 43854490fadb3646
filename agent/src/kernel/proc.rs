//! A process in `/proc`: its PID namespaces and cgroups. Between two reads the process may end and its pid be reused;
//! [`super::pidfd`] excludes that.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::read;

/// Inode number of the host's PID namespace; fixed by the kernel.
const HOST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// The process's ids in all PID namespaces it is visible in, outermost first: `NSpid` of `status`.
fn namespace_pids(status: &str) -> Option<Vec<u32>> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().map(|id| id.parse().ok()).collect()
}

/// `/proc` of one process at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFacts {
    /// Ids from the outermost visible PID namespace inwards; the last one is its own.
    pub namespace_pids: Vec<u32>,
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
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/status is malformed"));
        Ok(Self { namespace_pids: namespace_pids(&file("status")?).ok_or_else(malformed)?, cgroups: file("cgroup")? })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_listed_outermost_first() {
        assert_eq!(namespace_pids("Name:\tx\nTgid:\t9\nNSpid:\t4711\t1\n"), Some(vec![4711, 1]));
        assert_eq!(namespace_pids("NSpid:\tx\n"), None);
        assert_eq!(namespace_pids("Name:\tx\n"), None);
    }

    #[test]
    fn init_is_pid_one_of_a_nested_namespace() {
        let facts =
            |namespace_pids: &[u32]| ProcessFacts { namespace_pids: namespace_pids.to_vec(), cgroups: String::new() };
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
        assert_eq!(facts.namespace_pids.first(), Some(&me));
    }

    #[test]
    fn a_pid_that_cannot_exist_is_not_found() {
        let error = ProcessFacts::read(u32::MAX).expect_err("beyond any pid limit");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
