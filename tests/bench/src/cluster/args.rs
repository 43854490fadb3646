//! Arguments of `keblet-bench cluster`.

use std::path::PathBuf;
use std::time::Duration;

use crate::common::CommonArgs;
use crate::common::Peer;
use crate::common::duration;
use crate::manifest::PodNetwork;

/// Compares node agents as nodes of a real cluster.
///
/// Participants: `bare client` (a CRI client that starts and stops the same pods), `keblet`, every variant and every
/// peer. One agent after the other is the node of that name; its Node object is removed before and after.
#[derive(clap::Args, Clone, Debug)]
pub struct ClusterArgs {
    /// Arguments of every benchmark.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Kubeconfig of a user that may create pods and delete nodes
    #[arg(long, value_name = "PATH")]
    pub kubeconfig: PathBuf,
    /// Kubeconfig of the node
    #[arg(long, value_name = "PATH")]
    pub node_kubeconfig: PathBuf,
    /// The node's name in its credentials
    #[arg(long, value_name = "NAME")]
    pub node_name: String,
    /// The node's address; must not be a loopback address
    #[arg(long, value_name = "IP")]
    pub node_ip: Option<std::net::IpAddr>,
    /// Cgroup of the node, such as `/bench`: agents and the bare client keep the pods' cgroups in it [default: pods
    /// have no cgroups of their own]
    #[arg(long, value_name = "CGROUP")]
    pub cgroup_root: Option<String>,
    /// Pods use the host's network instead of one of their own
    #[arg(long)]
    pub host_network: bool,
    /// Pods that are created, deleted, exit or crash at once
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=500))]
    pub pods: u32,
    /// Pods that are created at once and idle, for `density`, `idle` and `probed-idle`
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=500))]
    pub density_pods: u32,
    /// Only these parts
    #[arg(long, value_enum, value_delimiter = ',')]
    pub only: Vec<Part>,
    /// Another node agent: a shell command in which {config}, {root}, {kubeconfig}, {node} and {ip} stand for a
    /// KubeletConfiguration file, a folder for its state, its credentials, its name and its address
    #[arg(long = "peer", value_name = "NAME=COMMAND")]
    pub peers: Vec<Peer>,
    /// Measure peers only in the first of these runs
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub peer_runs: u32,
    /// How long idle agents are observed; some of their requests have intervals of several minutes
    #[arg(long, default_value = "60s", value_parser = duration)]
    pub idle_time: Duration,
    /// How long pods are created for `churn`
    #[arg(long, default_value = "60s", value_parser = duration)]
    pub churn_time: Duration,
    /// Pods created in a second for `churn`
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=20))]
    pub churn_rate: u32,
    /// How long processes exit for `exit-flood`
    #[arg(long, default_value = "20s", value_parser = duration)]
    pub flood_time: Duration,
}

impl ClusterArgs {
    /// Whether this part is to be measured.
    pub(super) fn includes(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }

    /// The network of the pods.
    pub(super) fn network(&self) -> PodNetwork {
        if self.host_network { PodNetwork::Host } else { PodNetwork::Own }
    }

    /// Name of the benchmark in reports: figures of the two networks must not be mixed.
    pub(super) fn benchmark(&self) -> &'static str {
        if self.host_network { "cluster-host" } else { "cluster" }
    }

    /// Pods that `churn` creates.
    pub(super) fn churn_pods(&self) -> u32 {
        let seconds = u32::try_from(self.churn_time.as_secs()).unwrap_or(u32::MAX);
        seconds.saturating_mul(self.churn_rate)
    }
}

/// What happens to pods while they are measured.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Part {
    /// Pods bound to the node at once: from the first creation to all Ready
    Startup,
    /// The same pods deleted at once; each exits at SIGTERM: from its deletion to its object gone
    Delete,
    /// Pods whose processes exit one after the other: from the exit to `terminated` in a watch
    Exit,
    /// Pods whose processes crash one after the other: from the exit to the start of the next process
    Restart,
    /// Ten one-shot pods, each created when the one before has succeeded
    Chain,
    /// Pods with five init containers that complete at once: from the first process to the main one
    InitChain,
    /// Servers with a readiness probe, every second or every ten: from the open port to Ready in a watch
    Readiness,
    /// Servers whose liveness probe fails once: from the failure to the start of the next process
    Liveness,
    /// A Deployment with readiness probes: from its creation to available, and its rolling update
    Rollout,
    /// Pods with projected volumes and secrets, one after the other: what these add to the time to their sandboxes
    Volumes,
    /// A container whose CPU limit is changed in place: from the request to the limit in its cgroup and in the status
    Resize,
    /// Pods whose processes exceed their memory limit one after the other: from the kernel's kill to `OOMKilled` in a
    /// watch, and to the event on the pod
    Oom,
    /// Processes outside of pods that exit at a high rate beside an idle agent: what each exit costs the agent
    ExitFlood,
    /// One-shot pods created at a fixed rate, each deleted once it has succeeded
    Churn,
    /// Many pods bound to the node at once: from the first creation to all Ready
    Density,
    /// The same pods while nothing happens: what the agent and the runtime consume
    Idle,
    /// As many pods with a readiness probe each, by TCP and by HTTP: what the agent consumes
    ProbedIdle,
}

impl Part {
    /// All, in the order they are measured.
    pub(super) const ALL: [Self; 17] = [
        Self::Startup,
        Self::Delete,
        Self::Exit,
        Self::Restart,
        Self::Chain,
        Self::InitChain,
        Self::Readiness,
        Self::Liveness,
        Self::Rollout,
        Self::Volumes,
        Self::Resize,
        Self::Oom,
        Self::ExitFlood,
        Self::Churn,
        Self::Density,
        Self::Idle,
        Self::ProbedIdle,
    ];

    /// Whether it uses many pods and a newly started agent.
    pub(super) fn is_dense(self) -> bool {
        matches!(self, Self::Density | Self::Idle | Self::ProbedIdle)
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

    fn parse(args: &[&str]) -> Result<ClusterArgs, clap::Error> {
        Cli::try_parse_from(NEEDED.iter().chain(args)).map(|cli| cli.cluster)
    }

    #[test]
    fn parts_are_chosen() {
        let args = parse(&["--only", "startup,exit", "--runs", "5"]).unwrap();
        assert_eq!((args.pods, args.density_pods, args.common.runs), (30, 100, 5));
        assert!(args.includes(Part::Exit) && !args.includes(Part::Idle));
        assert!(parse(&[]).unwrap().includes(Part::Idle));
        assert_eq!(parse(&[]).unwrap().churn_pods(), 180);
        let flood = parse(&["--only", "exit-flood,oom", "--flood-time", "5s"]).unwrap();
        assert!(flood.includes(Part::Oom) && flood.flood_time == Duration::from_secs(5));
    }

    #[test]
    fn each_network_has_a_report_of_its_own() {
        let own = parse(&[]).unwrap();
        assert_eq!((own.network(), own.benchmark()), (PodNetwork::Own, "cluster"));
        let host = parse(&["--host-network"]).unwrap();
        assert_eq!((host.network(), host.benchmark()), (PodNetwork::Host, "cluster-host"));
    }

    #[test]
    fn invalid_arguments_are_rejected() {
        let bad: [&[&str]; 4] =
            [&["--peer", "kubelet {kubeconfig}"], &["--only", "nothing"], &["--pods", "0"], &["--node-ip", "x"]];
        for args in bad {
            assert!(parse(args).is_err(), "{args:?}");
        }
    }
}
