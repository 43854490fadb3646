//! Finds and kills the processes of a runtime. Processes are identified by PID and start time, never by name.

use std::collections::HashMap;
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::time::Instant;
use tokio::time::sleep;

/// Generous, for a busy machine.
const DYING_DEADLINE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);

/// A process, identified by PID and start time, since PIDs are reused.
pub(crate) struct Process {
    pid: i32,
    start: u64,
}

impl Process {
    /// Finds a running process.
    pub(crate) fn find(pid: i32) -> Option<Self> {
        Stat::read(pid).map(|stat| Self { pid, start: stat.start })
    }

    /// Kills it, unless it has exited, and waits until it has.
    pub(crate) async fn kill(&self) {
        kill_and_wait(|| match Stat::read(self.pid) {
            Some(stat) if stat.start == self.start => vec![self.pid],
            _ => Vec::new(),
        })
        .await;
    }
}

/// containerd and the shims, identified by the configuration and the socket in their command lines, and all their
/// descendants. containerd runs on if its supervisor is killed.
pub(crate) fn of_runtime(config: &Path, socket: &Path) -> Vec<i32> {
    let value = |path: &Path| path.as_os_str().as_encoded_bytes().to_vec();
    let options = [[b"--config".to_vec(), value(config)], [b"-address".to_vec(), value(socket)]];
    let mut parents = HashMap::new();
    let mut ours = HashSet::new();
    for pid in ids() {
        let Some(stat) = Stat::read(pid) else { continue };
        parents.insert(pid, stat.parent);
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = command.split(|byte| *byte == 0).collect();
        let are_given = |pair: &[Vec<u8>; 2]| words.windows(2).any(|words| words == pair.each_ref().map(Vec::as_slice));
        if options.iter().any(are_given) {
            ours.insert(pid);
        }
    }
    loop {
        let is_new_child = |pid: &i32, parent: &i32| ours.contains(parent) && !ours.contains(pid);
        let children: Vec<i32> =
            parents.iter().filter(|(pid, parent)| is_new_child(pid, parent)).map(|(pid, _)| *pid).collect();
        if children.is_empty() {
            return ours.into_iter().collect();
        }
        ours.extend(children);
    }
}

/// Kills the processes that the function returns until it returns none.
pub(crate) async fn kill_and_wait(victims: impl Fn() -> Vec<i32>) {
    let deadline = Instant::now() + DYING_DEADLINE;
    loop {
        let alive = victims();
        if alive.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in alive {
            // A process that exited meanwhile needs no signal.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        sleep(POLL).await;
    }
}

fn ids() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Fields of `/proc/PID/stat`, for a process that is not a zombie.
struct Stat {
    parent: i32,
    /// Start time in clock ticks since boot.
    start: u64,
}

impl Stat {
    fn read(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may contain spaces and parentheses; it ends at the last parenthesis.
        let (_, after) = stat.rsplit_once(')')?;
        let words: Vec<&str> = after.split_whitespace().collect();
        if *words.first()? == "Z" {
            return None;
        }
        Some(Self { parent: words.get(1)?.parse().ok()?, start: words.get(19)?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn stat_reads_the_parent_pid() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(Stat::read(own).unwrap().parent, nix::unistd::getppid().as_raw());
        assert!(Stat::read(i32::MAX).is_none());
    }

    #[test]
    fn processes_of_a_runtime_have_its_files_in_their_command_lines() {
        let start = |option: &str, value: &str| {
            let words = ["-c", "read line", "sh", option, value];
            std::process::Command::new("sh").args(words).stdin(Stdio::piped()).spawn()
        };
        let mut started = [("--config", "/k/1.toml"), ("-address", "/k/1.sock"), ("--config", "/k/2.toml")]
            .map(|(option, value)| start(option, value).unwrap());
        let pids = started.each_ref().map(|process| i32::try_from(process.id()).unwrap());
        let found = of_runtime(Path::new("/k/1.toml"), Path::new("/k/1.sock"));
        for process in &mut started {
            drop(process.stdin.take());
            process.wait().unwrap();
        }
        assert_eq!(pids.map(|pid| found.contains(&pid)), [true, true, false]);
    }

    #[tokio::test]
    async fn adopted_process_is_killed_but_not_a_reused_pid() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let process = Process::find(pid).unwrap();
        let reused = Process { pid, start: process.start + 1 };
        reused.kill().await;
        assert!(child.try_wait().unwrap().is_none());
        process.kill().await;
        assert!(!child.wait().unwrap().success());
    }
}
