//! The command line: its subcommands, and those of them that only read and report.
//!
//! Called as `kubelet` it is `keblet run`, so that a node can swap one binary for the other. Constructs nothing of the
//! agent; `wiring` does that.

pub mod bench;
mod closed_output;
pub mod config;
pub mod docs;
pub mod doctor;
pub mod endpoints;
pub mod host;
mod json_lines;
mod lines;
pub mod logging;
pub mod observe;
pub mod output;
pub mod process;
pub mod reports;
pub mod run_args;
pub mod version;

use std::ffi::OsString;
use std::path::Path;

use clap::Parser;
use clap::Subcommand;

use crate::config::flags::normalize;
pub use run_args::RunArgs;

/// A Kubernetes node agent driven by events instead of polling.
#[derive(Debug, Parser)]
#[command(name = "keblet", version, propagate_version = false, disable_help_subcommand = true, max_term_width = 120)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the node agent. Takes the flags and the configuration file of a kubelet
    Run(RunArgs),
    /// Check or explain the configuration without running the agent
    #[command(subcommand)]
    Config(config::Command),
    /// Report the features of this node, and the effect of each missing one
    Doctor(doctor::Args),
    /// Show what happens on this node: pods, exits, OOM kills, pressure. Reads only, beside any kubelet
    Observe(observe::Args),
    /// Report the OOM kills that are known on this node
    Oom(reports::Args),
    /// Report the pressure of this node and its pods, and which pods stall which
    Pressure(reports::Args),
    /// Measure this and other node agents side by side, with the program keblet-bench
    Bench(bench::Args),
    /// Print the version
    Version(version::Args),
    /// Print completions for a shell
    Completions(docs::CompletionsArgs),
    /// Print the manual page
    Man(docs::ManArgs),
}

/// Reads a command line, the program's own name first.
///
/// # Errors
/// An invalid command line; also requests for help, which are printed the same way.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(canonical(arguments))
}

/// Inserts `run` when called as `kubelet`, and turns underscores in flag names into hyphens, as kubelets accept them.
fn canonical(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments = arguments.into_iter();
    let program = arguments.next().unwrap_or_else(|| "keblet".into());
    let as_kubelet = Path::new(&program).file_name().is_some_and(|name| name == "kubelet");
    let rest = arguments.map(|argument| match argument.into_string() {
        Ok(text) => normalize(&text).into(),
        Err(argument) => argument,
    });
    std::iter::once(program).chain(as_kubelet.then(|| "run".into())).chain(rest).collect()
}

#[cfg(test)]
mod kubeadm_tests;
#[cfg(test)]
mod tests;
