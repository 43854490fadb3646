//! A container runtime for one user, that leaves nothing behind.
//!
//! Owns containerd, its files, network and cgroup from start to end. Takes orders on standard input
//! and answers each with a line of JSON; the end of the input, SIGTERM or SIGINT end it all: pods are removed through
//! CRI, then what is left by force. As a process of its own it does so also when its user was killed. Refuses to touch
//! the system's runtime and anything it did not start.

mod config;
mod cri;
mod host_resources;
mod network;
mod processes;
mod runtime;
mod shared;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use clap::Parser;
use keblet_peers::Answer;
use keblet_peers::Cache;
use keblet_peers::CleanupReport;
use keblet_peers::orders;
use keblet_peers::say;
use serde_json::Value;
use serde_json::json;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;

use crate::config::Layout;
use crate::runtime::Runtime;

/// Runs a private containerd until the end of standard input, then removes all that it brought forth.
///
/// Prints a line of JSON with its socket when it is ready, and one in answer to each order on standard input,
/// `{"ok": …}` or `{"error": "…"}`: `list` shows all pods, `kill` kills containerd with SIGKILL, `start` starts it again, `adopt PID` names a process
/// that is to be killed before the clean-up.
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
    // Before anything exists, so that no signal can end us between making a thing and knowing of it.
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let cache = arguments.cache.map_or_else(Cache::locate, Cache::at);
    let layout = Layout::create(arguments.dir, arguments.systemd_cgroup_driver)?;
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
    // The user may be gone, and then nobody reads this.
    let _ = say(&report);
    Ok(report)
}

/// Starts the runtime and follows orders until they end.
async fn serve(runtime: &mut Runtime) -> Result<()> {
    say(&runtime.start_new().await?)?;
    let mut orders = orders()?;
    while let Some(order) = orders.recv().await {
        let answer = follow(runtime, order.trim()).await;
        say(&answer.map_or_else(|error| Answer::Error(format!("{error:#}")), Answer::Ok))?;
    }
    Ok(())
}

/// Follows one order. A failed one is told and changes nothing for the next.
async fn follow(runtime: &mut Runtime, order: &str) -> Result<Value> {
    let answer = match order.split_once(' ') {
        None if order == "kill" => json!(runtime.kill().await?),
        None if order == "start" => json!(runtime.start().await?),
        None if order == "list" => json!(runtime.pods().await?),
        Some(("adopt", pid)) => json!(runtime.adopt(pid.parse().with_context(|| format!("{pid:?} is no process id"))?)),
        _ => bail!("unknown order {order:?}; see --help"),
    };
    Ok(answer)
}
