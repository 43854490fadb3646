//! `cargo xtask demo`: runs the agent on a private runtime and prints its events.
//!
//! ```text
//! setup ─▶ private containerd ─▶ keblet run ─▶ lines ─▶ event ─▶ screen
//!                │                                         │
//!                └─ pods, as the runtime reports them ─────┴─▶ steps ─▶ summary
//! ```
//! Owns the order of start, steps and clean-up. A step counts as shown only if the agent reported it and the runtime,
//! the kernel or the containers' own timestamps confirm it.

mod event;
mod observed;
mod pods;
mod screen;
mod stamps;
mod steps;

use std::process::Command;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Agent;
use keblet_peers::Node;
use keblet_peers::PrivateContainerd;
use keblet_peers::log_tail;
use serde_json::json;

use crate::interrupt::Interrupt;
use crate::progress::step;
use crate::run;
use crate::setup;
use crate::tiers::machine;
use event::Event;
use observed::ObservedState;
use screen::Screen;
use steps::DemoStep;

/// How often the runtime is queried for its pods.
const CHECK_PERIOD: Duration = Duration::from_millis(250);
const POLL: Duration = Duration::from_millis(20);
const END_TIMEOUT: Duration = Duration::from_secs(15);
const LOG_LINES: usize = 20;

/// Options of the demo.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Seconds until a step that has not been shown counts as failed.
    #[arg(long, default_value_t = 60)]
    timeout: u64,
    /// Show the agent's warnings and errors between the events.
    #[arg(long)]
    verbose: bool,
}

/// Runs the demo.
///
/// # Errors
/// The runtime or the agent cannot be started, the agent exits with an error, or something could not be removed.
pub(crate) fn demo(arguments: &Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    if let Some(lack) = machine::lacks_for_runtime() {
        bail!("{lack}: run the demo as root");
    }
    let cache = setup::prepare()?;
    run::build_programs()?;
    let mut containerd = run::start(&cache, None)?;
    let result = run_demo(arguments, &mut containerd, &interrupt);
    let cleaned = step("removing pods and runtime", || containerd.stop());
    let code = match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    };
    cleaned?;
    println!("Cleaned up: no process, mount, network interface, cgroup or file remains.");
    Ok(code)
}

/// Starts the agent, watches until all steps have a result, and stops the agent in any case.
fn run_demo(arguments: &Arguments, containerd: &mut PrivateContainerd, interrupt: &Interrupt) -> Result<ExitCode> {
    let node = Node::create(containerd.ready(), &json!({ "logging": { "format": "json" } }))?;
    let stamps = containerd.ready().dir.join("stamps");
    std::fs::create_dir_all(&stamps).with_context(|| format!("cannot create {}", stamps.display()))?;
    for pod in pods::all(&stamps) {
        node.write_manifest(pod.name, &pod.manifest)?;
    }
    let mut command = Command::new(run::agent());
    command.args(["run", "--hostname-override", pods::NODE]);
    command.arg("--config").arg(&node.config).arg("--root-dir").arg(&node.root);
    command.arg("--cert-dir").arg(node.root.join("pki"));
    let mut agent = Agent::start(&mut command, &node, containerd)?;
    let mut screen = Screen::new(arguments.verbose);
    screen.started(agent.pid(), &containerd.endpoint());
    let mut observed = ObservedState::new(stamps, node.pod_logs.clone());
    let mut steps = steps::all(machine::lacks_for_kernel());
    let watched = watch(
        arguments,
        DemoParts { containerd, node: &node, agent: &mut agent, interrupt },
        &mut observed,
        &mut steps,
        &mut screen,
    );
    let ended = agent.end(END_TIMEOUT);
    let interrupted = interrupt.raised();
    if ended.is_err() || !interrupted && (watched.is_err() || steps.iter().any(|step| !step.shown())) {
        eprintln!("\nEnd of the agent's log:\n{}\n", log_tail(&node.log, LOG_LINES));
    }
    watched?;
    let status = ended?;
    if interrupted {
        println!("\nInterrupted; cleaning up.");
        return Ok(ExitCode::from(130));
    }
    screen.summary(&steps, &observed);
    if !status.success() {
        bail!("the agent exited with {status} after SIGTERM");
    }
    Ok(if steps.iter().all(DemoStep::shown) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the demo watches.
struct DemoParts<'a> {
    containerd: &'a mut PrivateContainerd,
    node: &'a Node,
    agent: &'a mut Agent,
    interrupt: &'a Interrupt,
}

/// Prints events and checks the steps until all have a result, the timeout has passed or SIGINT arrives.
fn watch(
    arguments: &Arguments,
    parts: DemoParts<'_>,
    observed: &mut ObservedState,
    steps: &mut [DemoStep],
    screen: &mut Screen,
) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    let mut next_check = Instant::now();
    while !parts.interrupt.raised() {
        for line in parts.agent.lines() {
            match Event::parse(&line) {
                Some(event) => {
                    screen.event(&event);
                    observed.events.push(event);
                }
                None => screen.other(&line),
            }
        }
        if let Some(status) = parts.agent.ended()? {
            bail!("the agent exited by itself with {status}");
        }
        if Instant::now() >= next_check {
            observed.pods = parts.containerd.pods()?;
            next_check = Instant::now() + CHECK_PERIOD;
            for step in steps.iter_mut() {
                if let Some(update) = step.advance(observed, parts.node)? {
                    screen.note(step.name, &update);
                }
            }
        }
        if steps.iter().all(DemoStep::over) {
            break;
        }
        if Instant::now() > deadline {
            screen.note("demo", "timeout");
            break;
        }
        thread::sleep(POLL);
    }
    observed.pods = parts.containerd.pods()?;
    for step in steps {
        step.confirm(observed);
    }
    Ok(())
}
