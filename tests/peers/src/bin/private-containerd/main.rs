//! A private container runtime that leaves nothing behind.
//!
//! Owns containerd, its files, network and cgroup. Executes commands from standard input and answers each with a line
//! of JSON. The end of the input, SIGTERM and SIGINT start the clean-up: pods are removed through CRI, then remaining
//! resources by force. It is a process of its own so that it cleans up also when its user is killed. It touches neither
//! the system's runtime nor anything that it did not start.

mod config;
mod cri;
mod host_resources;
mod leftovers;
mod network;
mod processes;
mod runtime;
mod shared;

use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use clap::Parser;
use keblet_peers::Cache;
use keblet_peers::CleanupReport;
use keblet_peers::Response;
use keblet_peers::commands;
use keblet_peers::respond;
use serde_json::Value;
use serde_json::json;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;

use crate::config::Driver;
use crate::config::Layout;
use crate::runtime::Runtime;

/// Runs a private containerd until the end of standard input, then removes all its resources.
///
/// Prints a line of JSON with its socket when it is ready, and one in response to each command on standard input,
/// `{"ok": …}` or `{"error": "…"}`: `list` lists all pods, `kill` kills containerd with SIGKILL, `start` starts it
/// again, `adopt PID` registers a process that is killed before the clean-up, `import FILE` imports the images of an
/// archive.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Folder filled by `cargo xtask setup`.
    #[arg(long)]
    cache: Option<PathBuf>,
    /// Folder for all files of the runtime, removed at the end [default: a new one in the temporary folder].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Report the systemd cgroup driver through CRI; runc still writes cgroup files itself.
    #[arg(long)]
    systemd_cgroup_driver: bool,
    /// With --systemd-cgroup-driver, runc creates scopes through the running systemd.
    #[arg(long, requires = "systemd_cgroup_driver")]
    systemd_scopes: bool,
    /// Use the runc that `cargo xtask setup` has built instead of the distribution's.
    #[arg(long)]
    current_runc: bool,
    /// Give containers a negative oom_score_adj and AppArmor profiles; not every machine can.
    #[arg(long)]
    unrestricted: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match supervise(Arguments::parse()).await {
        Ok(report) if report.remaining.is_empty() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("private-containerd: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn supervise(arguments: Arguments) -> Result<CleanupReport> {
    // Registered first, so that no signal can terminate this process between creating a resource and recording it.
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let cache = arguments.cache.map_or_else(Cache::locate, Cache::at);
    let driver = match (arguments.systemd_cgroup_driver, arguments.systemd_scopes) {
        (false, _) => Driver::Cgroupfs,
        (true, false) => Driver::ReportedSystemd,
        (true, true) => Driver::Systemd,
    };
    let mut layout = Layout::create(arguments.dir, driver, arguments.current_runc)?;
    layout.unrestricted = arguments.unrestricted;
    let mut runtime = Runtime::new(cache, layout);
    let served = tokio::select! {
        served = serve(&mut runtime) => served,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    let report = CleanupReport { remaining: runtime.clean_up().await };
    for resource in &report.remaining {
        eprintln!("private-containerd: left behind: {resource}");
    }
    served?;
    // If the user has exited, the report is not read.
    let _ = respond(&report);
    Ok(report)
}

/// Starts the runtime and executes commands until the end of the input.
async fn serve(runtime: &mut Runtime) -> Result<()> {
    respond(&runtime.start_new().await?)?;
    let mut commands = commands()?;
    while let Some(command) = commands.recv().await {
        let result = execute(runtime, command.trim()).await;
        respond(&result.map_or_else(|error| Response::Error(format!("{error:#}")), Response::Ok))?;
    }
    Ok(())
}

/// Executes a command. A failure is reported and does not affect later commands.
async fn execute(runtime: &mut Runtime, command: &str) -> Result<Value> {
    let result = match command.split_once(' ') {
        None if command == "kill" => json!(runtime.kill().await?),
        None if command == "start" => json!(runtime.start().await?),
        None if command == "list" => json!(runtime.pods().await?),
        Some(("adopt", pid)) => {
            json!(runtime.adopt(pid.parse().with_context(|| format!("{pid:?} is not a process id"))?))
        }
        Some(("import", archive)) => json!(runtime.import(Path::new(archive)).await?),
        _ => bail!("unknown command {command:?}; see --help"),
    };
    Ok(result)
}
