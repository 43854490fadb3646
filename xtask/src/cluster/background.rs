//! The cluster of `cluster up`, which runs after the command has exited. Owns the folder in the cache that names the
//! process of the cluster, its log and its report.

use std::fs;
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::ExitCode;
use std::process::Stdio;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Cache;
use keblet_peers::log_tail;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;

use super::NodeArguments;
use super::POLL;
use super::local_cluster;
use crate::lock;
use crate::progress::step;

const END_DEADLINE: Duration = Duration::from_secs(120);
const LOG_LINES: usize = 25;

/// The folder of the one cluster in the background.
struct Home(PathBuf);

impl Home {
    fn locate() -> Result<Self> {
        let folder = Cache::locate().root().join("cluster");
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self(folder))
    }

    /// Held by `cluster up`: a second one waits until the cluster of the first can be used, instead of starting another one
    /// that nothing removes. Not by `cluster down`, which also ends a cluster that is being started.
    fn lock(&self) -> Result<File> {
        lock::hold(&self.0.join("lock"))
    }

    fn report(&self) -> PathBuf {
        self.0.join("report")
    }

    fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    /// PID and start time of the cluster's process; the start time distinguishes it from a later process with the same
    /// PID.
    fn pid_file(&self) -> PathBuf {
        self.0.join("process")
    }

    fn process(&self) -> Option<i32> {
        let text = fs::read_to_string(self.pid_file()).ok()?;
        let (pid, start) = text.trim().split_once(' ')?;
        let pid = pid.parse().ok()?;
        (started(pid)? == start).then_some(pid)
    }

    fn forget(&self) -> Result<()> {
        for file in [self.report(), self.pid_file()] {
            if file.exists() {
                fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
            }
        }
        Ok(())
    }
}

/// Starts a cluster unless there is one, and prints how to use it.
///
/// # Errors
/// The cluster's process cannot be started, exits early, or starts and stops at this moment without a report.
pub(super) fn up(node: &NodeArguments) -> Result<ExitCode> {
    let home = Home::locate()?;
    let _lock = home.lock()?;
    if home.process().is_none() {
        local_cluster::prepare(node)?;
        home.forget()?;
        step("starting a cluster", || start(&home, node))?;
    }
    let report = home.report();
    let text = fs::read_to_string(&report)
        .with_context(|| format!("a cluster is being started or stopped; {} does not exist", report.display()))?;
    print!("{text}");
    println!(
        "# For this shell: eval \"$(cargo xtask cluster up)\"; then `kubectl get nodes`. To remove it: cargo xtask cluster down"
    );
    Ok(ExitCode::SUCCESS)
}

/// Stops the cluster and waits until its process has exited.
///
/// # Errors
/// The process cannot be signalled, does not exit in time, or left something behind.
pub(super) fn down() -> Result<ExitCode> {
    let home = Home::locate()?;
    let Some(pid) = home.process() else {
        home.forget()?;
        println!("no cluster is running");
        return Ok(ExitCode::SUCCESS);
    };
    step("removing the cluster", || {
        kill(Pid::from_raw(pid), Signal::SIGTERM).with_context(|| format!("cannot stop process {pid}"))?;
        let deadline = Instant::now() + END_DEADLINE;
        while home.process().is_some() {
            if Instant::now() > deadline {
                bail!("process {pid} does not exit; its log is {}", home.log().display());
            }
            thread::sleep(POLL);
        }
        home.forget()
    })?;
    let log = log_tail(&home.log(), LOG_LINES);
    if log.contains("left behind") {
        bail!("{log}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a file atomically, so that a reader finds either no file or the whole text.
///
/// # Errors
/// The file cannot be written or renamed.
pub(super) fn write_report(path: &Path, text: &str) -> Result<()> {
    let partial = path.with_extension("partial");
    fs::write(&partial, text).with_context(|| format!("cannot write {}", partial.display()))?;
    fs::rename(&partial, path).with_context(|| format!("cannot rename {} to {}", partial.display(), path.display()))
}

fn start(home: &Home, node: &NodeArguments) -> Result<()> {
    let log = home.log();
    let output = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
    let mut command = Command::new(std::env::current_exe().context("cannot determine the path of this program")?);
    command.args(["cluster", "run", "--report"]).arg(home.report());
    command.args(["--timeout", &node.timeout.to_string()]);
    if node.no_node {
        command.arg("--no-node");
    }
    if node.metrics {
        command.arg("--metrics");
    }
    if let Some(agent) = &node.agent {
        command.arg("--agent").arg(agent);
    }
    let mut process = command
        .stdin(Stdio::null())
        .stdout(output.try_clone().context("cannot share the log")?)
        .stderr(output)
        // In a process group of its own, so that Ctrl-C of the terminal does not reach it.
        .process_group(0)
        .spawn()
        .context("cannot start the cluster's process")?;
    let pid = i32::try_from(process.id()).context("the process id is out of range")?;
    let start = started(pid).context("the cluster's process exited at once")?;
    write_report(&home.pid_file(), &format!("{pid} {start}"))?;
    while !home.report().exists() {
        if let Some(status) = process.try_wait().context("cannot wait for the cluster's process")? {
            home.forget()?;
            bail!("it exited with {status}:\n{}", log_tail(&log, LOG_LINES));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Start time of a running process, in clock ticks since boot (`starttime` of proc(5)); `None` for a zombie.
fn started(pid: i32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold spaces and parentheses; the last one ends it.
    let (_, after) = stat.rsplit_once(')')?;
    let words: Vec<&str> = after.split_whitespace().collect();
    (*words.first()? != "Z").then(|| words.get(19).map(|start| (*start).to_owned()))?
}
