//! Arguments of `keblet-bench pleg`.

use std::time::Duration;

use crate::common::CommonArgs;
use crate::common::Peer;
use crate::common::duration;

/// Compares event-driven with polling agents on one runtime, and both with bare CRI clients.
///
/// Participants: `bare client` (detects the exit of a process through a pidfd), `bare client (events)` (through the
/// runtime's events), `keblet`, `keblet without kernel sensors` (without BPF and pidfds), `keblet polling` (relists
/// each second), every variant and every peer. All pods are static and use the host's network.
#[derive(clap::Args, Clone, Debug)]
pub struct PlegArgs {
    /// Arguments of every benchmark.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Pods that crash, start at once, or idle
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pods: u32,
    /// Only these workloads
    #[arg(long = "only", value_enum, value_delimiter = ',')]
    pub workloads: Vec<WorkloadKind>,
    /// Another node agent: a shell command in which {manifests}, {root} and {config} stand for the static pod folder, a
    /// folder for its state and a KubeletConfiguration file
    #[arg(long = "peer", value_name = "NAME=COMMAND")]
    pub peers: Vec<Peer>,
    /// How long idle agents are observed
    #[arg(long, default_value = "60s", value_parser = duration)]
    pub idle_time: Duration,
    /// How many pods a bare client starts at the same time [default: all of them]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub bare_client_parallelism: Option<u32>,
}

/// What pods do while they are measured.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum WorkloadKind {
    /// Each pod's container exits once: from its exit to the start of the next process
    Crash,
    /// One pod with four init containers that exit at once: from the first process to the main one
    Chain,
    /// Ten such pods at the same time
    Chains,
    /// All pods are desired before the agent starts: from its start to the last process
    Start,
    /// Idle pods: what the agent and the runtime consume
    Idle,
}

impl WorkloadKind {
    /// All, in the order they are measured.
    pub const ALL: [Self; 5] = [Self::Crash, Self::Chain, Self::Chains, Self::Start, Self::Idle];
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        pleg: PlegArgs,
    }

    #[test]
    fn defaults_and_peers() {
        let command = "kubelet --config {config} --root-dir={root}";
        let args = ["bench", "--peer", &format!("go={command}"), "--only", "crash,idle"];
        let args = Cli::try_parse_from(args).unwrap().pleg;
        assert_eq!((args.pods, args.common.runs, args.idle_time), (20, 1, Duration::from_secs(60)));
        assert_eq!(args.peers, [Peer { name: "go".to_owned(), command: command.to_owned() }]);
        assert_eq!(args.workloads, [WorkloadKind::Crash, WorkloadKind::Idle]);
    }

    #[test]
    fn invalid_arguments_are_rejected() {
        let bad: [&[&str]; 6] = [
            &["--peer", "kubelet {config}"],
            &["--peer", "=kubelet {config}"],
            &["--agent-variant", "name="],
            &["--pods", "0"],
            &["--idle-time", "10ms"],
            &["--runtime-endpoint", "tcp://127.0.0.1:1"],
        ];
        for args in bad {
            assert!(Cli::try_parse_from(std::iter::once(&"bench").chain(args)).is_err(), "{args:?}");
        }
    }
}
