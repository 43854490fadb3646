//! Developer commands.
//!
//! Owns what a developer types: `setup`, `test`, `demo`, `cluster` and the checks of the tree. Refuses to link with the agent, so
//! that the first command of a clean clone starts within seconds.

mod bench;
mod cluster;
mod deb;
mod demo;
mod docs_paths;
mod ebpf;
mod interrupt;
mod layers;
mod licences;
mod paths;
mod peers;
mod progress;
mod report;
mod run;
mod setup;
mod system;
mod tiers;

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
    /// Fetch and build what tests and demo need, into `.cache` (or KEBLET_CACHE); quick when all is there.
    Setup(setup::Arguments),
    /// Show the agent at work on a private container runtime, live; ends by itself and leaves nothing behind.
    Demo(demo::Arguments),
    /// Run all tests that this machine can run, and say which it cannot.
    Test(tiers::Arguments),
    /// Build upstream's control plane, kubectl, metrics-server and kubelet from published Go modules; minutes the first
    /// time. Peers of tests and benchmarks only.
    Peers,
    /// A cluster on this machine: a real control plane, and keblet on a private containerd as its node.
    #[command(subcommand)]
    Cluster(cluster::Task),
    /// Build the kernel side and keep the object that the agent embeds.
    Ebpf(ebpf::Arguments),
    /// Run a benchmark of a release build, on a private containerd or in a private cluster.
    Bench(bench::Arguments),
    /// Make a Debian package that takes kubelet's place.
    Deb(deb::Arguments),
    /// Check that the agent's modules use only what `agent/layers.toml` lets them use.
    Layers,
    /// Check that every path and test that the documents name exists.
    DocsPaths,
    /// Check licences and sources of all crates against `deny.toml`.
    Licences,
    /// Run a private containerd: until Ctrl-C, or around a command that finds it through KEBLET_RUNTIME_ENDPOINT.
    Containerd(run::Arguments),
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
    match task {
        Task::Setup(arguments) => setup::setup(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Demo(arguments) => demo::demo(&arguments),
        Task::Test(arguments) => tiers::test(&arguments),
        Task::Peers => peers::build().map(|()| ExitCode::SUCCESS),
        Task::Cluster(task) => cluster::perform(&task),
        Task::Ebpf(arguments) => ebpf::run(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Bench(arguments) => bench::bench(&arguments),
        Task::Deb(arguments) => deb::deb(&arguments).map(|()| ExitCode::SUCCESS),
        Task::Layers => layers::check().map(|report| report.tell()),
        Task::DocsPaths => docs_paths::check().map(|report| report.tell()),
        Task::Licences => licences::check().map(|report| report.tell()),
        Task::Containerd(arguments) => run::containerd(&arguments),
    }
}
