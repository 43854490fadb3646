//! A cluster that outlives the command that started it. Owns the folder in the cache that says which process keeps it.

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

    fn report(&self) -> PathBuf {
        self.0.join("report")
    }

    fn log(&self) -> PathBuf {
        self.0.join("log")
    }

    /// The process that keeps the cluster, and when it started, which tells it from another of its number.
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
pub fn up(node: &NodeArguments) -> Result<ExitCode> {
    let home = Home::locate()?;
    if home.process().is_none() {
        local_cluster::prepare(node)?;
        home.forget()?;
        step("starting a cluster", || start(&home, node))?;
    }
    let report = home.report();
    let text = fs::read_to_string(&report)
        .with_context(|| format!("a cluster is being started or ended; {} is not there", report.display()))?;
    print!("{text}");
    println!(
        "# For this shell: eval \"$(cargo xtask cluster up)\"; then `kubectl get nodes`. To end it: cargo xtask cluster down"
    );
    Ok(ExitCode::SUCCESS)
}

/// Ends the cluster and waits until it is gone.
pub fn down() -> Result<ExitCode> {
    let home = Home::locate()?;
    let Some(pid) = home.process() else {
        home.forget()?;
        println!("no cluster runs");
        return Ok(ExitCode::SUCCESS);
    };
    step("removing the cluster", || {
        kill(Pid::from_raw(pid), Signal::SIGTERM).with_context(|| format!("cannot end process {pid}"))?;
        let deadline = Instant::now() + END_DEADLINE;
        while home.process().is_some() {
            if Instant::now() > deadline {
                bail!("process {pid} does not end; its log is {}", home.log().display());
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

/// Writes a file that is there only once it is whole.
pub fn write_report(path: &Path, text: &str) -> Result<()> {
    let partial = path.with_extension("partial");
    fs::write(&partial, text).with_context(|| format!("cannot write {}", partial.display()))?;
    fs::rename(&partial, path).with_context(|| format!("cannot rename {} to {}", partial.display(), path.display()))
}

fn start(home: &Home, node: &NodeArguments) -> Result<()> {
    let log = home.log();
    let output = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
    let mut command = Command::new(std::env::current_exe().context("cannot tell which program is running")?);
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
        // Not of the terminal's group, whose Ctrl-C is not for it.
        .process_group(0)
        .spawn()
        .context("cannot start the cluster's process")?;
    let pid = i32::try_from(process.id()).context("a strange process id")?;
    let start = started(pid).context("the cluster's process ended at once")?;
    write_report(&home.pid_file(), &format!("{pid} {start}"))?;
    while !home.report().exists() {
        if let Some(status) = process.try_wait().context("cannot wait for the cluster's process")? {
            home.forget()?;
            bail!("it ended with {status}:\n{}", log_tail(&log, LOG_LINES));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// When a living process started, in the kernel's ticks.
fn started(pid: i32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold spaces and parentheses; the last one ends it.
    let (_, after) = stat.rsplit_once(')')?;
    let words: Vec<&str> = after.split_whitespace().collect();
    (*words.first()? != "Z").then(|| words.get(19).map(|start| (*start).to_owned()))?
}
