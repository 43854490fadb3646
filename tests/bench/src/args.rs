//! What is measured, as the command line says.

use std::str::FromStr;
use std::time::Duration;

use super::common::CommonArgs;

/// Compares event-driven with polling agents on one runtime, and both with bare CRI clients.
///
/// Columns: `event floor` (a bare client that acts on the runtime's events), `kernel floor` (one that acts on the death of
/// the process), `evented` (keblet as it is), `no kernel` (without BPF and pidfds), `relist` (polling each second), and
/// every peer.
#[derive(clap::Args, Clone, Debug)]
pub struct PlegArgs {
    /// As for every benchmark.
    #[command(flatten)]
    pub common: CommonArgs,
    /// Pods that crash, start at once, or idle
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pods: u32,
    /// Measure every workload this many times, the columns taking turns (idling is measured once)
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Only these workloads
    #[arg(long = "workload", value_enum, value_delimiter = ',')]
    pub workloads: Vec<WorkloadKind>,
    /// Another node agent: a shell command in which {manifests}, {root} and {config} stand for the static pod folder, a
    /// folder for its state and a KubeletConfiguration file
    #[arg(long = "peer", value_name = "NAME=COMMAND")]
    pub peers: Vec<Peer>,
    /// How long idle agents are watched
    #[arg(long, default_value = "60s", value_parser = duration)]
    pub idle_time: Duration,
    /// How many pods a floor starts at the same time [default: all of them]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub floor_parallelism: Option<u32>,
}

/// What pods do while they are watched.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum WorkloadKind {
    /// Each pod's container exits once: from its exit to the start of the next process
    Crash,
    /// One pod with four init containers that exit at once: from the first process to the main one
    Chain,
    /// Ten such pods at the same time
    Chains,
    /// All pods are there before the agent: from its start to the last process
    Start,
    /// Nothing happens: what the agent and the runtime consume
    Idle,
}

impl WorkloadKind {
    /// All, in the order they are measured.
    pub const ALL: [Self; 5] = [Self::Crash, Self::Chain, Self::Chains, Self::Start, Self::Idle];
}

/// Another node agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its column.
    pub name: String,
    /// A shell command with placeholders.
    pub command: String,
}

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, command) = text.split_once('=').ok_or("expected NAME=COMMAND")?;
        if name.is_empty() || command.trim().is_empty() {
            return Err("expected NAME=COMMAND, neither of them empty".to_owned());
        }
        if !command.contains("{config}") && !command.contains("{manifests}") {
            return Err("the command uses neither {config} nor {manifests}, so it cannot see the pods".to_owned());
        }
        Ok(Self { name: name.to_owned(), command: command.to_owned() })
    }
}

/// At least a second.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration < Duration::from_secs(1) => Err("at least a second".to_owned()),
        Ok(duration) => Ok(duration),
        Err(error) => Err(error.to_string()),
    }
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
        let args = ["bench", "--peer", &format!("go={command}"), "--workload", "crash,idle"];
        let args = Cli::try_parse_from(args).unwrap().pleg;
        assert_eq!((args.pods, args.rounds, args.idle_time), (20, 3, Duration::from_secs(60)));
        assert_eq!(args.peers, [Peer { name: "go".to_owned(), command: command.to_owned() }]);
        assert_eq!(args.workloads, [WorkloadKind::Crash, WorkloadKind::Idle]);
    }

    #[test]
    fn bad_arguments_are_refused() {
        let bad: [&[&str]; 6] = [
            &["--peer", "kubelet {config}"],
            &["--peer", "=kubelet {config}"],
            &["--peer", "kubelet=kubelet --config mine"],
            &["--pods", "0"],
            &["--idle-time", "10ms"],
            &["--runtime-endpoint", "tcp://127.0.0.1:1"],
        ];
        for args in bad {
            assert!(Cli::try_parse_from(std::iter::once(&"bench").chain(args)).is_err(), "{args:?}");
        }
    }
}
