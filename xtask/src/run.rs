//! `cargo xtask containerd`: a private runtime at hand, for experiments and for programs that need one.

use std::ffi::OsString;
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
    dir: Option<std::path::PathBuf>,
    /// A command to run; the runtime ends with it. It finds the socket in KEBLET_RUNTIME_ENDPOINT, the cgroup for its
    /// pods in KEBLET_CGROUP_ROOT and a folder that is removed at the end in KEBLET_RUNTIME_DIR.
    #[arg(last = true)]
    command: Vec<OsString>,
}

/// Runs the command, or waits for Ctrl-C.
pub fn containerd(arguments: &Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::install()?;
    let cache = setup::prepare()?;
    let containerd = start(&cache, arguments.dir.clone())?;
    let result = match arguments.command.split_first() {
        Some((program, rest)) => command(program, rest, &containerd, &interrupt),
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

/// Builds the supervisor and starts a runtime.
pub fn start(cache: &Cache, dir: Option<std::path::PathBuf>) -> Result<PrivateContainerd> {
    let supervisor = build_supervisor()?;
    step("starting a private containerd", || {
        PrivateContainerd::start(cache, &Options { dir, supervisor: Some(supervisor) })
    })
}

/// Builds the program that owns a private runtime.
pub fn build_supervisor() -> Result<std::path::PathBuf> {
    step("building the supervisor of the runtime", || {
        system::quiet(
            Command::new(paths::cargo())
                .args(["build", "--quiet", "--package", "keblet-peers", "--bin", "private-containerd"])
                .current_dir(paths::repository()),
        )
    })?;
    Ok(paths::target().join("debug/private-containerd"))
}

fn command(
    program: &OsString,
    arguments: &[OsString],
    containerd: &PrivateContainerd,
    interrupt: &Interrupt,
) -> Result<ExitCode> {
    let mut child = Command::new(program)
        .args(arguments)
        .env("KEBLET_RUNTIME_ENDPOINT", containerd.endpoint())
        .env("KEBLET_CGROUP_ROOT", &containerd.ready().cgroup_root)
        .env("KEBLET_RUNTIME_DIR", &containerd.ready().dir)
        .spawn()
        .with_context(|| format!("cannot run {}", program.display()))?;
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
