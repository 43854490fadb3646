//! `cargo xtask containerd`: a private runtime around a program that needs one, or at hand for experiments; and the
//! builds and programs that other commands share.

use std::ffi::OsStr;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;
use keblet_peers::Options;
use keblet_peers::PrivateContainerd;

use crate::interrupt::Interrupt;
use crate::paths;
use crate::progress::step;
use crate::setup;
use crate::system;

const POLL: Duration = Duration::from_millis(50);

/// What to run beside the runtime.
#[derive(clap::Args)]
pub struct Arguments {
    /// Folder for the runtime's files [default: a new one in the temporary folder].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// A command to run; the runtime ends with it. It finds the socket in KEBLET_RUNTIME_ENDPOINT, the cgroup for its
    /// pods in KEBLET_CGROUP_ROOT and a folder that is removed at the end in KEBLET_RUNTIME_DIR.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// Runs the command, or waits for Ctrl-C.
pub fn containerd(arguments: &Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let cache = setup::prepare()?;
    build_supervisor()?;
    let mut containerd = start(&cache, arguments.dir.clone())?;
    let result = match arguments.command.split_first() {
        Some((program, rest)) => command(program, rest, &environment(&containerd), &mut containerd, &interrupt),
        None => {
            println!("{}", serde_json::to_string_pretty(containerd.ready()).context("cannot encode what is ready")?);
            eprintln!("Ctrl-C ends it.");
            while !interrupt.raised() {
                thread::sleep(POLL);
            }
            Ok(ExitCode::SUCCESS)
        }
    };
    step("removing pods and runtime", || containerd.stop())?;
    result
}

/// Starts a runtime with a supervisor that is built already.
pub fn start(cache: &Cache, dir: Option<PathBuf>) -> Result<PrivateContainerd> {
    let options = Options { dir, supervisor: Some(supervisor()), ..Options::default() };
    step("starting a private containerd", || PrivateContainerd::start(cache, &options))
}

/// The program that owns a private runtime, once it is built.
pub fn supervisor() -> PathBuf {
    paths::target().join("debug/private-containerd")
}

/// The program that owns a private control plane, once it is built.
pub fn control_plane_supervisor() -> PathBuf {
    paths::target().join("debug/private-control-plane")
}

/// The agent, once it is built.
pub fn agent() -> PathBuf {
    paths::target().join("debug/keblet")
}

/// Builds all programs of the workspace, in one go, so that demo and tests share what is built.
pub fn build_programs() -> Result<()> {
    build("building keblet (minutes, the first time)", &["--workspace", "--exclude", "xtask", "--bins"])
}

/// Not the whole workspace: a runtime is of use also while the agent does not compile.
pub fn build_supervisor() -> Result<()> {
    build("building the runtime's supervisor", &["--package", "keblet-peers", "--bin", "private-containerd"])
}

/// What starts a cluster: the supervisors, and the agent if it is to be its node.
pub fn build_cluster(agent: bool) -> Result<()> {
    if agent {
        return build_programs();
    }
    build("building the supervisors", &["--package", "keblet-peers", "--bins"])
}

/// Builds what `selection` names, quietly.
pub fn build(name: &str, selection: &[&str]) -> Result<()> {
    let mut command = Command::new(paths::cargo());
    command.args(["build", "--quiet"]).args(selection).current_dir(paths::repository());
    step(name, || system::quiet(&mut command))
}

/// How a command finds the runtime.
pub fn environment(containerd: &PrivateContainerd) -> Vec<(&'static str, OsString)> {
    vec![
        ("KEBLET_RUNTIME_ENDPOINT", containerd.endpoint().into()),
        ("KEBLET_CGROUP_ROOT", containerd.ready().cgroup_root.clone().into()),
        ("KEBLET_RUNTIME_DIR", containerd.ready().dir.clone().into()),
    ]
}

/// Runs a command beside the runtime, which kills it should we be killed.
pub fn command(
    program: &OsStr,
    arguments: &[OsString],
    environment: &[(&'static str, OsString)],
    containerd: &mut PrivateContainerd,
    interrupt: &Interrupt,
) -> Result<ExitCode> {
    let mut child = Command::new(program)
        .args(arguments)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
    containerd.adopt(child.id())?;
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the command")? {
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            return Ok(code.map_or(ExitCode::FAILURE, ExitCode::from));
        }
        if interrupt.raised() {
            // The terminal sent the signal to it as well; a program that stays must not keep the runtime alive.
            thread::sleep(Duration::from_secs(2));
            if child.try_wait().context("cannot wait for the command")?.is_none() {
                child.kill().context("cannot end the command")?;
                child.wait().context("cannot wait for the command")?;
            }
            return Ok(ExitCode::from(130));
        }
        thread::sleep(POLL);
    }
}
