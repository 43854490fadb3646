//! `cargo xtask cluster`: a real cluster on this machine, in the background or around a command.
//!
//! ```text
//! up ──▶ background: run ──▶ control plane   private-control-plane: etcd, API server, controllers, scheduler
//! down ─▶ SIGTERM            ├─▶ containerd  private-containerd: runtime, pods' network, cgroup
//!                            └─▶ node        keblet, joined with certificates of the control plane
//! ```
//! Owns the order of start and stop, and the report for the developer. All components are the real programs, and exit
//! with the process that started them.

mod background;
mod local_cluster;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::interrupt::Interrupt;
use crate::run;
use local_cluster::LocalCluster;

const POLL: Duration = Duration::from_millis(50);

/// What to do with a cluster.
#[derive(clap::Subcommand)]
pub(crate) enum Task {
    /// Start a cluster in the background and print how to use it.
    Up(NodeArguments),
    /// Stop and remove the cluster that `up` started.
    Down,
    /// Run a cluster in the foreground: until Ctrl-C, or around a command.
    Run(RunArguments),
}

/// The agent of the node.
#[derive(clap::Args, Clone)]
pub(crate) struct NodeArguments {
    /// Start no agent: only the control plane and a runtime, with the files of a prepared node.
    #[arg(long)]
    no_node: bool,
    /// Another agent as node, called with kubelet's flags; for comparisons.
    #[arg(long, conflicts_with = "no_node")]
    agent: Option<PathBuf>,
    /// Start metrics-server as well, for `kubectl top`.
    #[arg(long)]
    metrics: bool,
    /// How many seconds the node has to become Ready.
    #[arg(long, default_value_t = 60)]
    timeout: u64,
}

/// What to run in the cluster.
#[derive(clap::Args)]
pub(crate) struct RunArguments {
    #[command(flatten)]
    node: NodeArguments,
    /// File for the report, read by the `cluster up` that started this process in the background.
    #[arg(long, hide = true)]
    report: Option<PathBuf>,
    /// A command to run; the cluster is removed when it exits. It finds kubectl on its path, KUBECONFIG, and the
    /// variables that `cluster up` prints.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// Performs the task.
///
/// # Errors
/// The cluster cannot be started, stopped or removed, or the command cannot be run.
pub(crate) fn perform(task: &Task) -> Result<ExitCode> {
    match task {
        Task::Up(node) => background::up(node),
        Task::Down => background::down(),
        Task::Run(arguments) => foreground(arguments),
    }
}

/// Runs `work` with a control plane and a runtime, without agent.
///
/// # Errors
/// The cluster cannot be started or removed, or `work` fails.
pub(crate) fn without_node(work: impl FnOnce(&mut LocalCluster, &Interrupt) -> Result<ExitCode>) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let no_node = NodeArguments { no_node: true, agent: None, metrics: false, timeout: 0 };
    let programs = local_cluster::prepare(&no_node)?;
    let mut cluster = LocalCluster::start(&programs, &no_node, &interrupt)?;
    let result = work(&mut cluster, &interrupt);
    cluster.stop()?;
    result
}

fn foreground(arguments: &RunArguments) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let programs = local_cluster::prepare(&arguments.node)?;
    let mut cluster = LocalCluster::start(&programs, &arguments.node, &interrupt)?;
    let result = match arguments.command.split_first() {
        Some((program, rest)) => {
            let environment = cluster.environment();
            run::command(program, rest, &environment, cluster.containerd(), &interrupt)
        }
        None => attend(&mut cluster, arguments, &interrupt),
    };
    cluster.stop()?;
    result
}

/// Prints or writes the report and waits for SIGINT or SIGTERM.
fn attend(cluster: &mut LocalCluster, arguments: &RunArguments, interrupt: &Interrupt) -> Result<ExitCode> {
    match &arguments.report {
        Some(report) => background::write_report(report, &cluster.report())?,
        None => {
            print!("{}", cluster.report());
            eprintln!("Ctrl-C stops and removes it.");
        }
    }
    while !interrupt.raised() {
        cluster.check_agent()?;
        thread::sleep(POLL);
    }
    Ok(ExitCode::SUCCESS)
}
