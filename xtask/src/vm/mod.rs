//! `cargo xtask vm`: a small virtual machine with cgroup v2 only and PSI, for tests and for trying something.
//!
//! ```text
//! host                                     machine (qemu, software emulation)
//! .cache/machine/root ── virtiofs ───────▶ / (an overlay in memory), /vm/init
//! target, .cache, --share ── virtiofs ───▶ the same paths, /share
//! job.rs ── port `control` ──────────────▶ /vm/run ─▶ the command
//!        ◀─ ports `stdout`, `stderr` ────┘
//!        ◀─ port `control`: exit code
//! ```
//! The machine has no network, a disk of its own only for benchmarks that read from it, and leaves nothing behind but what
//! it writes to `--share`. The folder of a command that was killed is removed by the next one.

mod folder;
pub(crate) mod guest;
mod job;
mod machine;
mod qemu;
mod relay;
pub(crate) mod suite;

use std::ffi::OsString;
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;
use nix::unistd::Uid;

use crate::interrupt::Interrupt;
use crate::paths;
use crate::run;
use crate::setup;
use machine::Machine;
use machine::Output;
pub(crate) use qemu::Disk;

/// Options of the command.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    task: Option<Task>,
}

#[derive(clap::Subcommand)]
enum Task {
    /// Run a set of tests in the machine; the default without a subcommand.
    Test {
        /// Run only these sets.
        #[arg(value_enum)]
        sets: Vec<suite::Set>,
    },
    /// Run a command in the machine. Its output and exit code are passed on.
    ///
    /// The machine has containerd, runc and CNI plugins in `$KEBLET_CACHE`, and the programs of the last build in its
    /// path: keblet, private-containerd.
    Run(RunArguments),
}

/// Options of `cargo xtask vm run`.
#[derive(clap::Args)]
struct RunArguments {
    /// Memory of the machine, in bytes with a suffix M or G.
    #[arg(long, default_value = "1G", value_parser = mebibytes)]
    memory: u32,
    /// Processors of the machine.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// A folder to mount at /share, read-write.
    #[arg(long, value_name = "DIR")]
    share: Option<PathBuf>,
    /// Run systemd and a bus; the command is a service.
    #[arg(long)]
    systemd: bool,
    /// The command and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Boots machines.
///
/// # Errors
/// A machine cannot be prepared, does not boot, or ends without an exit code.
pub(crate) fn vm(arguments: &Arguments) -> Result<ExitCode> {
    if let Some(lack) = lacks() {
        anyhow::bail!("no virtual machine here: {lack}");
    }
    let interrupt = Interrupt::install()?;
    match &arguments.task {
        Some(Task::Run(arguments)) => run_command(arguments, &interrupt),
        Some(Task::Test { sets }) => suite::run(sets, &interrupt),
        None => suite::run(&[], &interrupt),
    }
}

/// What this machine lacks for running another one.
pub(crate) fn lacks() -> Option<String> {
    if std::env::consts::ARCH != "x86_64" {
        return Some("only x86_64 machines are supported".to_owned());
    }
    if !Uid::effective().is_root() {
        return Some("sharing folders with a virtual machine needs root".to_owned());
    }
    if !Path::new("/etc/debian_version").exists() {
        return Some("its programs are Debian packages, and this is another system".to_owned());
    }
    None
}

/// Fills the part of the cache that machines need.
///
/// # Errors
/// As [`setup::prepare`] and [`setup::prepare_machine`].
pub(crate) fn prepare() -> Result<Cache> {
    let cache = setup::prepare()?;
    setup::prepare_machine(&cache)?;
    Ok(cache)
}

/// Runs a command in a machine with this memory in MiB, whose working directory is the shared folder. What the command
/// needs must be built.
///
/// # Errors
/// As [`vm`].
pub(crate) fn command(
    command: &[OsString],
    memory: u32,
    disk: Option<Disk>,
    share: &Path,
    interrupt: &Interrupt,
) -> Result<ExitCode> {
    if let Some(lack) = lacks() {
        anyhow::bail!("no virtual machine here: {lack}");
    }
    let cache = prepare()?;
    let mut machine = Machine::new(&cache);
    machine.memory = memory;
    machine.disk = disk;
    machine.share(share, Path::new("/share"), true);
    machine.directory = "/share".into();
    Ok(ExitCode::from(machine.run(command, Output::Inherit, interrupt)?))
}

fn run_command(arguments: &RunArguments, interrupt: &Interrupt) -> Result<ExitCode> {
    let cache = prepare()?;
    run::build_programs()?;
    let mut machine = Machine::new(&cache);
    machine.memory = arguments.memory;
    machine.cpus = arguments.cpus;
    machine.systemd = arguments.systemd;
    if let Some(folder) = &arguments.share {
        let folder = folder.canonicalize().with_context(|| format!("--share {}", folder.display()))?;
        machine.share(&folder, Path::new("/share"), true);
    }
    machine.directory = "/share".into();
    let code = machine.run(&arguments.command, Output::Inherit, interrupt)?;
    Ok(ExitCode::from(code))
}

/// `512M` or `2G` as mebibytes.
fn mebibytes(text: &str) -> Result<u32, String> {
    let wrong = || format!("{text:?} is not a size such as 512M or 2G");
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(wrong)?;
    let number: u32 = number.parse().map_err(|_| wrong())?;
    let size = match unit {
        "M" => Some(number),
        "G" => number.checked_mul(1024),
        _ => None,
    };
    let size = size.ok_or_else(wrong)?;
    if size < 256 { Err("the machine needs at least 256M".to_owned()) } else { Ok(size) }
}

/// Folders of the host that a command may need, at the same paths in the machine.
fn shared_folders(cache: &Cache) -> [PathBuf; 2] {
    [paths::target(), cache.root().to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_need_a_unit_and_suffice_for_a_boot() {
        assert_eq!(mebibytes("512M"), Ok(512));
        assert_eq!(mebibytes("2G"), Ok(2048));
        for wrong in ["", "G", "1024", "1T", "-1G", "1€", "128M", "9999999G"] {
            assert!(mebibytes(wrong).is_err(), "{wrong}");
        }
    }
}
