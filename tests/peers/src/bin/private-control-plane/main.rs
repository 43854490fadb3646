//! A Kubernetes control plane for one user, that leaves nothing behind.
//!
//! Owns etcd, API server, controller manager and scheduler, their address, certificates, data and logs from start to
//! end. Takes orders on standard input, a line of JSON each, and answers each with one; the end of the input, SIGTERM or
//! SIGINT end it all. As a process of its own it does so also when its user was killed. Refuses to look beyond this
//! machine: every part listens on one loopback address that nobody else uses.

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
use keblet_peers::Answer;
use keblet_peers::CleanupReport;
use keblet_peers::Order;
use keblet_peers::orders;
use keblet_peers::say;
use serde_json::Value;
use serde_json::json;
use tokio::signal::unix::SignalKind;
use tokio::signal::unix::signal;

use crate::layout::Layout;
use crate::plane::Plane;

/// Runs a private control plane until the end of standard input, then removes all that it brought forth.
///
/// Prints a line of JSON with its kubeconfig when it is ready, and one in answer to each order on standard input,
/// `{"ok": …}` or `{"error": "…"}`. The orders: `{"kill": PART}`, `{"stop": PART}`, `{"start": PART}`,
/// `{"freeze": PART}`, `{"thaw": PART}`, `"compact"` and `{"issue": IDENTITY}`.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Folder of upstream's programs, as `cargo xtask peers` makes it.
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
    // Before anything exists, so that no signal can end us between making a thing and knowing of it.
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
    // The user may be gone, and then nobody reads this.
    let _ = say(&report);
    Ok(report)
}

/// Starts the parts and follows orders until they end.
async fn serve(plane: &mut Plane) -> Result<()> {
    // Also while it starts: a user who is gone by then gets no control plane.
    let mut orders = orders()?;
    let mut early = Vec::new();
    let ready = {
        let start = plane.start_new();
        tokio::pin!(start);
        loop {
            tokio::select! {
                ready = &mut start => break ready?,
                order = orders.recv() => match order {
                    Some(order) => early.push(order),
                    None => return Ok(()),
                },
            }
        }
    };
    say(&ready)?;
    for order in early {
        obey(plane, &order).await?;
    }
    while let Some(order) = orders.recv().await {
        obey(plane, &order).await?;
    }
    Ok(())
}

async fn obey(plane: &mut Plane, order: &str) -> Result<()> {
    let answer = follow(plane, order).await;
    say(&answer.map_or_else(|error| Answer::Error(format!("{error:#}")), Answer::Ok))
}

/// Follows one order. A failed one is told and changes nothing for the next.
async fn follow(plane: &mut Plane, order: &str) -> Result<Value> {
    let order: Order = serde_json::from_str(order).with_context(|| format!("unknown order {order:?}; see --help"))?;
    let answer = match order {
        Order::Kill(part) => json!(plane.kill(part).await?),
        Order::Stop(part) => json!(plane.stop(part).await?),
        Order::Start(part) => json!(plane.start(part).await?),
        Order::Freeze(part) => json!(plane.freeze(part)?),
        Order::Thaw(part) => json!(plane.thaw(part)?),
        Order::Compact => json!(plane.compact().await?),
        Order::Issue(identity) => json!(plane.issue(&identity)?),
    };
    Ok(answer)
}
