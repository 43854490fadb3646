//! `cargo xtask cluster`: a real cluster on this machine, in the background or around a command.
//!
//! ```text
//! up ──▶ background: run ──▶ control plane   private-control-plane: etcd, API server, controllers, scheduler
//! down ─▶ SIGTERM            ├─▶ containerd  private-containerd: runtime, pods' network, cgroup
//!                            └─▶ node        keblet, joined with certificates of the control plane
//! ```
//! Owns the order of start and end and what a developer is told. Refuses to imitate anything: all parts are the real
//! ones, and they go when the process that started them goes.

mod background;
mod stage;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::interrupt::Interrupt;
use crate::run;
use stage::Stage;

const POLL: Duration = Duration::from_millis(50);

/// What to do with a cluster.
#[derive(clap::Subcommand)]
pub enum Task {
    /// Start a cluster in the background and say how to use it.
    Up(NodeArguments),
    /// End the cluster that `up` started, and remove it.
    Down,
    /// Run a cluster in the foreground: until Ctrl-C, or around a command.
    Run(RunArguments),
}

/// Who is the node.
#[derive(clap::Args, Clone)]
pub struct NodeArguments {
    /// Start no agent: only the control plane and a runtime, with the node's configuration and access at hand.
    #[arg(long)]
    no_node: bool,
    /// Another agent as node, called with kubelet's flags; for comparisons.
    #[arg(long, conflicts_with = "no_node")]
    agent: Option<PathBuf>,
    /// Start metrics-server as well, for `kubectl top`.
    #[arg(long)]
    metrics: bool,
    /// How many seconds the node has to get Ready.
    #[arg(long, default_value_t = 60)]
    patience: u64,
}

/// What to run in the cluster.
#[derive(clap::Args)]
pub struct RunArguments {
    #[command(flatten)]
    node: NodeArguments,
    /// Where to write what is ready, for the process that started us in the background.
    #[arg(long, hide = true)]
    report: Option<PathBuf>,
    /// A command to run; the cluster ends with it. It finds kubectl on its path, KUBECONFIG, and the variables that
    /// `cluster up` prints.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// Does it.
pub fn perform(task: &Task) -> Result<ExitCode> {
    match task {
        Task::Up(node) => background::up(node),
        Task::Down => background::down(),
        Task::Run(arguments) => foreground(arguments),
    }
}

/// A control plane and a runtime without agent, for as long as `work` takes.
pub fn without_node(work: impl FnOnce(&mut Stage, &Interrupt) -> Result<ExitCode>) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let nobody = NodeArguments { no_node: true, agent: None, metrics: false, patience: 0 };
    let programs = stage::prepare(&nobody)?;
    let mut stage = Stage::set(&programs, &nobody, &interrupt)?;
    let result = work(&mut stage, &interrupt);
    stage.strike()?;
    result
}

fn foreground(arguments: &RunArguments) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let programs = stage::prepare(&arguments.node)?;
    let mut stage = Stage::set(&programs, &arguments.node, &interrupt)?;
    let result = match arguments.command.split_first() {
        Some((program, rest)) => {
            let environment = stage.environment();
            run::command(program, rest, &environment, stage.containerd(), &interrupt)
        }
        None => attend(&mut stage, arguments, &interrupt),
    };
    stage.strike()?;
    result
}

/// Says that it is ready and stays until somebody wants the end.
fn attend(stage: &mut Stage, arguments: &RunArguments, interrupt: &Interrupt) -> Result<ExitCode> {
    match &arguments.report {
        Some(report) => background::write_report(report, &stage.report())?,
        None => {
            print!("{}", stage.report());
            eprintln!("Ctrl-C ends it.");
        }
    }
    while !interrupt.raised() {
        stage.look_after()?;
        thread::sleep(POLL);
    }
    Ok(ExitCode::SUCCESS)
}
