//! What is measured, as the command line says.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::args::duration;
use crate::common::CommonArgs;

/// Compares node agents as nodes of a real cluster.
///
/// Columns: `runtime floor` (a bare CRI client that starts the same pods), `keblet`, and every peer. Each agent in turn
/// is the one node of that name; its Node object is removed before and after.
#[derive(clap::Args, Clone, Debug)]
pub struct ClusterArgs {
    /// As for every benchmark.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Kubeconfig of somebody who may create pods and delete nodes
    #[arg(long, value_name = "PATH")]
    pub kubeconfig: PathBuf,
    /// Kubeconfig of the node
    #[arg(long, value_name = "PATH")]
    pub node_kubeconfig: PathBuf,
    /// The node's name, as its credentials have it
    #[arg(long, value_name = "NAME")]
    pub node_name: String,
    /// The node's address; not a loopback one
    #[arg(long, value_name = "IP")]
    pub node_ip: Option<std::net::IpAddr>,
    /// Pods that are created, deleted or end at once
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=500))]
    pub pods: u32,
    /// Pods that idle
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=500))]
    pub idle_pods: u32,
    /// Measure everything this many times, the columns taking turns (idling is measured once)
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Only these workloads
    #[arg(long = "workload", value_enum, value_delimiter = ',')]
    pub workloads: Vec<ClusterWorkload>,
    /// Another node agent: a shell command in which {config}, {root}, {kubeconfig}, {node} and {ip} stand for a
    /// KubeletConfiguration file, a folder for its state, its credentials, its name and its address
    #[arg(long = "peer", value_name = "NAME=COMMAND")]
    pub peers: Vec<ClusterPeer>,
    /// How long idle agents are watched; some requests come every ten seconds, so that a minute is short
    #[arg(long, default_value = "180s", value_parser = duration)]
    pub idle_time: Duration,
}

impl ClusterArgs {
    /// Shall this be measured?
    pub(super) fn wants(&self, workload: ClusterWorkload) -> bool {
        self.workloads.is_empty() || self.workloads.contains(&workload)
    }
}

/// What happens to pods while they are watched.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ClusterWorkload {
    /// Pods bound to the node at once: from the first creation to all Ready
    Burst,
    /// The same pods deleted at once; each ends at SIGTERM: from its deletion to its object gone
    Delete,
    /// Pods whose processes end one after the other: from the exit to `terminated` in a watch
    Exit,
    /// Ten pods that end at once, each created when the last one has succeeded
    OneShot,
    /// Nothing happens: what the agent consumes
    Idle,
}

/// Another node agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClusterPeer {
    /// Its column.
    pub name: String,
    /// A shell command with placeholders.
    pub command: String,
}

impl FromStr for ClusterPeer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, command) = text.split_once('=').ok_or("expected NAME=COMMAND")?;
        if name.is_empty() || command.trim().is_empty() {
            return Err("expected NAME=COMMAND, neither of them empty".to_owned());
        }
        if !command.contains("{kubeconfig}") {
            return Err("the command does not use {kubeconfig}, so it cannot be a node of the cluster".to_owned());
        }
        Ok(Self { name: name.to_owned(), command: command.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        cluster: ClusterArgs,
    }

    const NEEDED: [&str; 7] =
        ["bench", "--kubeconfig", "/admin", "--node-kubeconfig", "/node", "--node-name", "bench-node"];

    #[test]
    fn defaults_and_peers() {
        let peer = ["--peer", "kubelet=kubelet --kubeconfig {kubeconfig}", "--workload", "burst,exit"];
        let args = Cli::try_parse_from(NEEDED.into_iter().chain(peer)).unwrap().cluster;
        assert_eq!((args.pods, args.idle_pods, args.rounds), (30, 100, 2));
        assert_eq!(args.peers[0].command, "kubelet --kubeconfig {kubeconfig}");
        assert!(args.wants(ClusterWorkload::Exit) && !args.wants(ClusterWorkload::Idle));
    }

    #[test]
    fn bad_arguments_are_refused() {
        let bad: [&[&str]; 4] = [
            &["--peer", "kubelet {kubeconfig}"],
            &["--peer", "k=kubelet {config}"],
            &["--pods", "0"],
            &["--node-ip", "x"],
        ];
        for args in bad {
            let all = NEEDED.iter().chain(args);
            assert!(Cli::try_parse_from(all).is_err(), "{args:?}");
        }
    }
}
