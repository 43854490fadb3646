//! Arguments of `keblet-bench pressure`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::common::CommonArgs;
use crate::common::Peer;
use crate::common::duration;

/// Measures what agents report of OOM kills.
///
/// Participants: `keblet`, every variant and every peer. In the part thrash, keblet has a pressure policy, and
/// `keblet without policy` none: what the policy gains shows in the requests to a pod that does not thrash. Pods of the
/// part oom are static; all use the host's network. Needs cgroup v2 and root, and changes memory limits of the cgroups of
/// its pods.
#[derive(clap::Args, Clone, Debug)]
pub struct PressureArgs {
    /// Arguments of every benchmark.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Cgroup of the node, such as `/bench`: the pods' cgroups are in it
    #[arg(long, value_name = "CGROUP", default_value = "/")]
    pub cgroup_root: String,
    /// Only these parts
    #[arg(long = "only", value_enum, value_delimiter = ',')]
    pub parts: Vec<PressurePart>,
    /// Processes that are killed by the OOM killer
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub kills: u32,
    /// Also let the kernel kill because the node is out of memory, which may hit other processes of this machine
    #[arg(long)]
    pub node_oom: bool,
    /// How long an agent may take to report a kill, and to show that a container has ended
    #[arg(long, default_value = "10s", value_parser = duration)]
    pub report_time: Duration,
    /// The cluster of race and thrash; without it there is neither
    #[command(flatten)]
    pub cluster: ClusterAccess,
    /// How fast pods of the race grow, in MiB per second
    #[arg(long = "speed", value_delimiter = ',', default_values_t = [50, 200, 500])]
    pub speeds: Vec<u32>,
    /// Pods that grow at each speed, one after the other
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub races: u32,
    /// Threshold of memory.available in the race, in MiB
    #[arg(long, default_value_t = 300)]
    pub threshold: u32,
    /// How often a pod stalls the node, one time after the other
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub stalls: u32,
    /// Memory that the pod leaves to the rest of the node and to the file that it reads, in MiB
    #[arg(long, default_value_t = 40)]
    pub leave_mb: u32,
    /// Size of the file, in MiB: a little more than is left. The kernel counts only reads of what it would have kept in a
    /// little more memory as waiting for memory, not those of a much larger file
    #[arg(long, default_value_t = 72, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub thrash_mb: u32,
    /// Where the file is, on a disk; the folder of the results by default
    #[arg(long, value_name = "DIR")]
    pub thrash_folder: Option<PathBuf>,
    /// Another node agent: a shell command in which {root} and {config} stand for a folder for its state and a
    /// KubeletConfiguration file; for race and thrash also {kubeconfig}, {node} and {ip}
    #[arg(long = "peer", value_name = "NAME=COMMAND")]
    pub peers: Vec<Peer>,
}

/// A cluster with the agent as one of its nodes.
#[derive(clap::Args, Clone, Debug)]
pub struct ClusterAccess {
    /// Kubeconfig of a user that may create pods and delete nodes
    #[arg(long, value_name = "PATH", requires_all = ["node_kubeconfig", "node_name"])]
    pub kubeconfig: Option<PathBuf>,
    /// Kubeconfig of the node
    #[arg(long, value_name = "PATH", requires = "kubeconfig")]
    pub node_kubeconfig: Option<PathBuf>,
    /// The node's name in its credentials
    #[arg(long, value_name = "NAME", requires = "kubeconfig")]
    pub node_name: Option<String>,
    /// The node's address; must not be a loopback address
    #[arg(long, value_name = "IP", requires = "kubeconfig")]
    pub node_ip: Option<IpAddr>,
}

/// A part of the benchmark.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum PressurePart {
    /// OOM kills of main processes, children, exec processes and groups, at every limit
    Oom,
    /// A pod that grows towards a threshold of memory.available: evicted, or killed by the kernel before
    Race,
    /// A pod that stalls the node: relieved by a pressure policy, or not
    Thrash,
}

impl PressurePart {
    /// All, in the order they are measured.
    pub const ALL: [Self; 3] = [Self::Oom, Self::Race, Self::Thrash];

    /// The agent is a node of a cluster.
    pub fn needs_cluster(self) -> bool {
        self != Self::Oom
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::participant::Participant;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        pressure: PressureArgs,
    }

    #[test]
    fn kills_of_the_node_must_be_asked_for() {
        let args = Cli::try_parse_from(["bench"]).unwrap().pressure;
        assert_eq!((args.kills, args.node_oom, args.cgroup_root.as_str()), (1000, false, "/"));
        assert!(Cli::try_parse_from(["bench", "--node-oom", "--only", "oom"]).unwrap().pressure.node_oom);
        assert!(Cli::try_parse_from(["bench", "--kills", "0"]).is_err());
        assert!(Cli::try_parse_from(["bench", "--only", "none"]).is_err());
        assert!(Cli::try_parse_from(["bench", "--kubeconfig", "/k"]).is_err(), "a cluster needs a node");
    }

    #[test]
    fn a_stalled_node_is_measured_with_a_policy_and_without() {
        let chosen = |words: &[&str]| {
            let args = Cli::try_parse_from(["bench"].iter().chain(words)).unwrap().pressure;
            Participant::of_thrash(&args).unwrap()
        };
        let without = Participant::Keblet { name: "keblet without policy".to_owned(), configuration: None };
        let all = chosen(&[]);
        assert!(matches!(&all[0], Participant::Keblet { configuration: Some(text), .. } if text.contains("Enforce")));
        assert_eq!(all.len(), 2);
        assert_eq!(all[1], without);
        assert_eq!(chosen(&["--participant", "keblet without policy"]), [without]);
    }
}
