//! Developer commands.
//!
//! Does not depend on the agent, so that the first command of a clean clone starts within seconds.

mod bench;
mod cluster;
mod deb;
mod demo;
mod docs_paths;
mod ebpf;
mod image;
mod interrupt;
mod layers;
mod licences;
mod lock;
mod paths;
mod peers;
mod progress;
mod report;
mod run;
mod setup;
mod system;
mod tiers;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use clap::Subcommand;

/// Developer commands of keblet.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Fetch and build what tests and demo need, into `.cache` (or KEBLET_CACHE); quick if it is complete.
    Setup(setup::Arguments),
    /// Run the agent on a private container runtime and print its events; exits by itself and leaves nothing behind.
    Demo(demo::Arguments),
    /// Run all tests that this machine can run, and report which it cannot.
    Test(tiers::Arguments),
    /// Build upstream's control plane, kubectl, metrics-server and kubelet from published Go modules; takes minutes the
    /// first time. Only benchmarks and cluster tests need them.
    Peers,
    /// A cluster on this machine: a real control plane, and keblet on a private containerd as its node.
    #[command(subcommand)]
    Cluster(cluster::Task),
    /// Build the BPF programs and write the object that the agent embeds.
    Ebpf(ebpf::Arguments),
    /// Run a benchmark of a release build, on a private containerd or in a private cluster.
    Bench(bench::Arguments),
    /// Build a Debian package that replaces the kubelet.
    Deb(deb::Arguments),
    /// Pack a container image that runs keblet, without a registry.
    Image(image::Arguments),
    /// Check the imports of the agent's modules against `agent/layers.toml`.
    Layers,
    /// Check that every path and test in the documents exists.
    DocsPaths,
    /// Check licences and sources of all crates against `deny.toml`.
    Licences,
    /// Run a private containerd: until Ctrl-C, or around a command, which finds it through KEBLET_RUNTIME_ENDPOINT.
    Containerd(run::Arguments),
    /// Boot a small virtual machine with cgroup v2 and PSI, and run tests or any command in it.
    Vm(vm::Arguments),
}

fn main() -> ExitCode {
    match perform(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: Task) -> Result<ExitCode> {
    interrupt::end_programs()?;
    match task {
        Task::Setup(arguments) => setup::setup(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Demo(arguments) => demo::demo(&arguments),
        Task::Test(arguments) => Ok(tiers::test(&arguments)),
        Task::Peers => peers::build().map(|()| ExitCode::SUCCESS),
        Task::Cluster(task) => cluster::perform(&task),
        Task::Ebpf(arguments) => ebpf::run(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Bench(arguments) => bench::bench(&arguments),
        Task::Deb(arguments) => deb::deb(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Image(arguments) => image::image(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Layers => layers::check().map(|report| report.print()),
        Task::DocsPaths => docs_paths::check().map(|report| report.print()),
        Task::Licences => licences::check().map(|report| report.print()),
        Task::Containerd(arguments) => run::containerd(&arguments),
        Task::Vm(arguments) => vm::vm(&arguments),
    }
}
