//! `cargo xtask demo`: the agent at work on a private runtime, live in the terminal.
//!
//! ```text
//! setup ─▶ private containerd ─▶ keblet run ─▶ lines ─▶ event ─▶ screen
//!                │                                         │
//!                └─ pods, as the runtime sees them ────────┴─▶ scenes ─▶ summary
//! ```
//! Owns the order of things. Refuses to believe the agent: a scene counts as shown only when the agent reported it and
//! the runtime, the kernel or the containers' own stamps confirm it.

mod event;
mod pods;
mod scenes;
mod screen;
mod stamps;
mod world;

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
use scenes::Scene;
use screen::Screen;
use world::World;

/// How often the runtime is asked what it sees.
const LOOK: Duration = Duration::from_millis(250);
const POLL: Duration = Duration::from_millis(20);
const END_PATIENCE: Duration = Duration::from_secs(15);
const LOG_LINES: usize = 20;

/// How to show it.
#[derive(clap::Args)]
pub struct Arguments {
    /// Seconds until a scene that has not been shown counts as failed.
    #[arg(long, default_value_t = 60)]
    timeout: u64,
    /// Show the agent's warnings and errors between the events.
    #[arg(long)]
    verbose: bool,
}

/// Runs the demo from start to end.
pub fn demo(arguments: &Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    if let Some(lack) = machine::lacks_for_runtime() {
        bail!("{lack}: run the demo as root");
    }
    let cache = setup::prepare()?;
    run::build_programs()?;
    let mut containerd = run::start(&cache, None)?;
    let played = play(arguments, &mut containerd, &interrupt);
    let cleaned = step("removing pods and runtime", || containerd.stop());
    let code = match played {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    };
    cleaned?;
    println!("Nothing is left: no process, mount, network, cgroup or file.");
    Ok(code)
}

/// Starts the agent, watches until all scenes are over, and ends the agent, whatever happened.
fn play(arguments: &Arguments, containerd: &mut PrivateContainerd, interrupt: &Interrupt) -> Result<ExitCode> {
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
    let mut world = World::new(stamps, node.pod_logs.clone());
    let mut scenes = scenes::all(machine::lacks_for_kernel());
    let watched = watch(
        arguments,
        Stage { containerd, node: &node, agent: &mut agent, interrupt },
        &mut world,
        &mut scenes,
        &mut screen,
    );
    let ended = agent.end(END_PATIENCE);
    let interrupted = interrupt.raised();
    if ended.is_err() || !interrupted && (watched.is_err() || scenes.iter().any(|scene| !scene.shown())) {
        eprintln!("\nThe agent's last words:\n{}\n", log_tail(&node.log, LOG_LINES));
    }
    watched?;
    let status = ended?;
    if interrupted {
        println!("\nInterrupted; cleaning up.");
        return Ok(ExitCode::from(130));
    }
    screen.summary(&scenes, &world);
    if !status.success() {
        bail!("the agent ended with {status} after SIGTERM");
    }
    Ok(if scenes.iter().all(Scene::shown) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What takes part.
struct Stage<'a> {
    containerd: &'a mut PrivateContainerd,
    node: &'a Node,
    agent: &'a mut Agent,
    interrupt: &'a Interrupt,
}

/// Shows events and moves the scenes on until all are over, time is up or somebody interrupts.
fn watch(
    arguments: &Arguments,
    stage: Stage<'_>,
    world: &mut World,
    scenes: &mut [Scene],
    screen: &mut Screen,
) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout);
    let mut next_look = Instant::now();
    while !stage.interrupt.raised() {
        for line in stage.agent.lines() {
            match Event::parse(&line) {
                Some(event) => {
                    screen.event(&event);
                    world.events.push(event);
                }
                None => screen.other(&line),
            }
        }
        if let Some(status) = stage.agent.ended()? {
            bail!("the agent ended by itself with {status}");
        }
        if Instant::now() >= next_look {
            world.pods = stage.containerd.pods()?;
            next_look = Instant::now() + LOOK;
            for scene in scenes.iter_mut() {
                if let Some(news) = scene.advance(world, stage.node)? {
                    screen.note(scene.name, &news);
                }
            }
        }
        if scenes.iter().all(Scene::over) {
            break;
        }
        if Instant::now() > deadline {
            screen.note("demo", "time is up");
            break;
        }
        thread::sleep(POLL);
    }
    world.pods = stage.containerd.pods()?;
    for scene in scenes {
        scene.confirm(world);
    }
    Ok(())
}
