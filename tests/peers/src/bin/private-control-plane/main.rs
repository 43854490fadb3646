//! A private Kubernetes control plane that leaves nothing behind.
//!
//! Owns etcd, API server, controller manager and scheduler, their address, certificates, data and logs. Executes
//! commands from standard input, a line of JSON each, and answers each with one. The end of the input, SIGTERM and
//! SIGINT start the clean-up. It is a process of its own so that it cleans up also when its user is killed. All
//! components listen on one unused loopback address.

mod arguments;
mod authority;
mod http;
mod layout;
mod objects;
mod part;
mod plane;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use anyhow::Result;
use clap::Parser;
use keblet_peers::CleanupReport;
use keblet_peers::PlaneCommand;
use keblet_peers::Response;
use keblet_peers::commands;
use keblet_peers::respond;
use serde_json::Value;
use serde_json::json;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;

use crate::layout::Layout;
use crate::plane::Plane;

/// Runs a private control plane until the end of standard input, then removes all its resources.
///
/// Prints a line of JSON with its kubeconfig when it is ready, and one in response to each command on standard input,
/// `{"ok": …}` or `{"error": "…"}`. The commands: `{"kill": PART}`, `{"stop": PART}`, `{"start": PART}`,
/// `{"freeze": PART}`, `{"thaw": PART}`, `"compact"` and `{"issue": IDENTITY}`.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Folder of upstream's programs, as `cargo xtask peers` builds it.
    #[arg(long)]
    programs: PathBuf,
    /// Further arguments of kube-apiserver.
    #[arg(last = true)]
    api_server: Vec<String>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match supervise(Arguments::parse()).await {
        Ok(report) if report.remaining.is_empty() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("private-control-plane: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn supervise(arguments: Arguments) -> Result<CleanupReport> {
    // Registered first, so that no signal can terminate this process between creating a resource and recording it.
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let layout = Layout::create(arguments.programs)?;
    let mut plane = Plane::new(layout, arguments.api_server);
    let served = tokio::select! {
        served = serve(&mut plane) => served,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    let report = CleanupReport { remaining: plane.clean_up().await };
    for resource in &report.remaining {
        eprintln!("private-control-plane: left behind: {resource}");
    }
    served?;
    // If the user has exited, the report is not read.
    let _ = respond(&report);
    Ok(report)
}

/// Starts the components and executes commands until the end of the input.
async fn serve(plane: &mut Plane) -> Result<()> {
    // Commands are read during the start as well, so that the start is cancelled when the user exits.
    let mut commands = commands()?;
    let mut early = Vec::new();
    let ready = {
        let start = plane.start_new();
        tokio::pin!(start);
        loop {
            tokio::select! {
                ready = &mut start => break ready?,
                command = commands.recv() => match command {
                    Some(command) => early.push(command),
                    None => return Ok(()),
                },
            }
        }
    };
    respond(&ready)?;
    for command in early {
        execute_and_respond(plane, &command).await?;
    }
    while let Some(command) = commands.recv().await {
        execute_and_respond(plane, &command).await?;
    }
    Ok(())
}

async fn execute_and_respond(plane: &mut Plane, command: &str) -> Result<()> {
    let result = execute(plane, command).await;
    respond(&result.map_or_else(|error| Response::Error(format!("{error:#}")), Response::Ok))
}

/// Executes a command. A failure is reported and does not affect later commands.
async fn execute(plane: &mut Plane, command: &str) -> Result<Value> {
    let command: PlaneCommand =
        serde_json::from_str(command).with_context(|| format!("unknown command {command:?}; see --help"))?;
    let result = match command {
        PlaneCommand::Kill(part) => json!(plane.kill(part).await?),
        PlaneCommand::Stop(part) => json!(plane.stop(part).await?),
        PlaneCommand::Start(part) => json!(plane.start(part).await?),
        PlaneCommand::Freeze(part) => json!(plane.freeze(part)?),
        PlaneCommand::Thaw(part) => json!(plane.thaw(part)?),
        PlaneCommand::Compact => json!(plane.compact().await?),
        PlaneCommand::Issue(identity) => json!(plane.issue(&identity)?),
    };
    Ok(result)
}
