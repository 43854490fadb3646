//! `cargo xtask containerd`: a private runtime around a command, or for experiments; and the builds and programs that
//! other commands share.

use std::ffi::OsStr;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::Cache;
use keblet_peers::Options;
use keblet_peers::PrivateContainerd;

use crate::interrupt::Interrupt;
use crate::paths;
use crate::progress::step;
use crate::setup;
use crate::system;

const POLL: Duration = Duration::from_millis(50);

/// Options of `cargo xtask containerd`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Folder for the runtime's files [default: a new one in the temporary folder].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// A command to run; the runtime is removed when it exits. It finds the socket in KEBLET_RUNTIME_ENDPOINT, the
    /// cgroup for its pods in KEBLET_CGROUP_ROOT and a folder that is removed at the end in KEBLET_RUNTIME_DIR.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// Runs the command, or waits for Ctrl-C.
///
/// # Errors
/// The runtime cannot be built, started or removed, or the command cannot be run.
pub(crate) fn containerd(arguments: &Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let cache = setup::prepare()?;
    build_supervisor()?;
    let mut containerd = start(&cache, arguments.dir.clone())?;
    let result = match arguments.command.split_first() {
        Some((program, rest)) => command(program, rest, &environment(&containerd), &mut containerd, &interrupt),
        None => {
            println!(
                "{}",
                serde_json::to_string_pretty(containerd.ready()).context("cannot encode the state of the runtime")?
            );
            eprintln!("Ctrl-C stops and removes it.");
            while !interrupt.raised() {
                thread::sleep(POLL);
            }
            Ok(ExitCode::SUCCESS)
        }
    };
    step("removing pods and runtime", || containerd.stop())?;
    result
}

/// Starts a runtime by a supervisor that is already built.
///
/// # Errors
/// The runtime does not start.
pub(crate) fn start(cache: &Cache, dir: Option<PathBuf>) -> Result<PrivateContainerd> {
    let options = Options { dir, supervisor: Some(supervisor()), ..Options::default() };
    step("starting a private containerd", || PrivateContainerd::start(cache, &options))
}

/// Path of the runtime's supervisor.
pub(crate) fn supervisor() -> PathBuf {
    paths::target().join("debug/private-containerd")
}

/// Path of the control plane's supervisor.
pub(crate) fn control_plane_supervisor() -> PathBuf {
    paths::target().join("debug/private-control-plane")
}

/// Path of the agent.
pub(crate) fn agent() -> PathBuf {
    paths::target().join("debug/keblet")
}

/// Builds the agent for release, with cargo's output shown; returns its path.
///
/// # Errors
/// The build fails.
pub(crate) fn build_release() -> Result<PathBuf> {
    let mut command = Command::new(paths::cargo());
    command.current_dir(paths::repository()).args(["build", "--release", "-p", "keblet"]);
    let status = system::status(&mut command)?;
    ensure!(status.success(), "building keblet failed with {status}");
    Ok(paths::target().join("release/keblet"))
}

/// Builds all programs of the workspace in one cargo call, so that demo and tests share the build.
///
/// # Errors
/// The build fails.
pub(crate) fn build_programs() -> Result<()> {
    build("building keblet (minutes, the first time)", &["--workspace", "--exclude", "xtask", "--bins"])
}

/// Builds the supervisors only, so that a runtime can be started while the agent does not compile.
///
/// # Errors
/// The build fails.
pub(crate) fn build_supervisor() -> Result<()> {
    build("building the runtime's supervisor", &["--package", "keblet-peers", "--bin", "private-containerd"])
}

/// Builds what starts a cluster: the supervisors, and with `agent` the agent.
///
/// # Errors
/// The build fails.
pub(crate) fn build_cluster(agent: bool) -> Result<()> {
    if agent {
        return build_programs();
    }
    build("building the supervisors", &["--package", "keblet-peers", "--bins"])
}

/// Builds the packages that `selection` names; prints cargo's output only on failure.
///
/// # Errors
/// The build fails.
pub(crate) fn build(name: &str, selection: &[&str]) -> Result<()> {
    if setup::is_prebuilt() {
        return Ok(());
    }
    let mut command = Command::new(paths::cargo());
    command.args(["build", "--quiet"]).args(selection).current_dir(paths::repository());
    step(name, || system::quiet(&mut command))
}

/// As [`build`], beside other work: at the lowest priority, which leaves the processors to that work, and without output.
///
/// # Errors
/// The build fails; the error has the end of cargo's output.
pub(crate) fn build_beside(selection: &[&str]) -> Result<()> {
    let mut command = Command::new("nice");
    command.args(["-n", "19"]).arg(paths::cargo()).args(["build", "--quiet"]).args(selection);
    system::quiet(command.current_dir(paths::repository()))
}

/// Environment variables through which a command finds the runtime.
pub(crate) fn environment(containerd: &PrivateContainerd) -> Vec<(&'static str, OsString)> {
    vec![
        ("KEBLET_RUNTIME_ENDPOINT", containerd.endpoint().into()),
        ("KEBLET_CGROUP_ROOT", containerd.ready().cgroup_root.clone().into()),
        ("KEBLET_RUNTIME_DIR", containerd.ready().dir.clone().into()),
    ]
}

/// Runs a command. The runtime's supervisor kills it if this process is killed.
///
/// # Errors
/// The command cannot be started or waited for.
pub(crate) fn command(
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
            // The terminal has sent the signal to the command as well; one that keeps running must not keep the runtime
            // running.
            thread::sleep(Duration::from_secs(2));
            if child.try_wait().context("cannot wait for the command")?.is_none() {
                child.kill().context("cannot kill the command")?;
                child.wait().context("cannot wait for the command")?;
            }
            return Ok(ExitCode::from(130));
        }
        thread::sleep(POLL);
    }
}
