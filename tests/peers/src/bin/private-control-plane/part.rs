//! One program of the control plane as a child process.

use std::fs;
use std::fs::File;
use std::path::Path;
use std::process::ExitStatus;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::process::Child;
use tokio::process::Command;
use tokio::time::timeout;

const STOP_DEADLINE: Duration = Duration::from_secs(15);
const LOG_TAIL: usize = 15;

/// A running program; killed when dropped.
pub(crate) struct Process(Child);

impl Process {
    /// Starts it. Its output is appended to the log.
    ///
    /// # Errors
    /// The log cannot be opened or the program cannot be started.
    pub(crate) fn start(program: &Path, arguments: &[String], home: &Path, log: &Path) -> Result<Self> {
        let log = File::options()
            .append(true)
            .create(true)
            .open(log)
            .with_context(|| format!("cannot open {}", log.display()))?;
        let child = Command::new(program)
            .args(arguments)
            .env_remove("NOTIFY_SOCKET")
            .env_remove("KUBECONFIG")
            // Some keep caches in the home folder, and proxy variables must not affect loopback connections.
            .env("HOME", home)
            .env("NO_PROXY", "127.0.0.0/8,10.0.0.0/8,localhost")
            .current_dir(home)
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("cannot share the log")?)
            .stderr(log)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        Ok(Self(child))
    }

    /// Sends a signal, unless the process has exited.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = self.0.id().and_then(|pid| i32::try_from(pid).ok()) {
            // It is a child process that was not reaped yet, so its PID cannot have been reused.
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Kills it and waits until it has exited.
    ///
    /// # Errors
    /// It cannot be killed.
    pub(crate) async fn kill(&mut self) -> Result<()> {
        self.0.kill().await.context("cannot kill it")
    }

    /// Stops it with SIGTERM; kills it after the timeout.
    ///
    /// # Errors
    /// It cannot be signalled or waited for.
    pub(crate) async fn stop(&mut self) -> Result<()> {
        self.signal(Signal::SIGTERM);
        match timeout(STOP_DEADLINE, self.0.wait()).await {
            Ok(ended) => ended.map(drop).context("cannot wait for its exit"),
            Err(_) => self.kill().await,
        }
    }

    /// Its exit status, if it has exited by itself.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.0.try_wait().context("cannot wait for it")
    }
}

/// The last lines of a log, for messages.
pub(crate) fn log_tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_TAIL)..].join("\n")
}
