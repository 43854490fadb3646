//! `keblet-bench`: measures node agents side by side. `keblet bench` runs this program.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use clap::Subcommand;
use keblet::cli::process;
use keblet_bench::ClusterArgs;
use keblet_bench::FloodArgs;
use keblet_bench::PlegArgs;
use keblet_bench::PressureArgs;

/// Measures node agents side by side in one run.
#[derive(Debug, Parser)]
#[command(name = "keblet-bench", version, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Compare event-driven with polling agents on one runtime
    Pleg(Box<PlegArgs>),
    /// Compare node agents as nodes of a real cluster
    Cluster(Box<ClusterArgs>),
    /// Compare what agents report of OOM kills, on cgroup v2
    Pressure(Box<PressureArgs>),
    /// Merge the JSON of several runs into one report
    Merge(MergeArgs),
    /// Start processes that exit at once, for `cluster --only exit-flood`
    #[command(hide = true)]
    Flood(FloodArgs),
}

#[derive(Debug, clap::Args)]
struct MergeArgs {
    /// JSON of runs of one benchmark, such as cluster-run1.json
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Folder for the report
    #[arg(long, value_name = "DIR", default_value = "keblet-bench")]
    output: PathBuf,
}

fn main() -> ExitCode {
    match perform(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("keblet-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(command: Command) -> anyhow::Result<()> {
    // Without the threads of a runtime.
    if let Command::Flood(args) = &command {
        return keblet_bench::run_flood(args);
    }
    let runtime = process::runtime()?;
    match command {
        Command::Pleg(args) => runtime.block_on(keblet_bench::run_pleg(*args)),
        Command::Cluster(args) => runtime.block_on(keblet_bench::run_cluster(*args)),
        Command::Pressure(args) => runtime.block_on(keblet_bench::run_pressure(*args)),
        Command::Merge(args) => keblet_bench::merge(&args.files, &args.output),
        Command::Flood(args) => keblet_bench::run_flood(&args),
    }
}
