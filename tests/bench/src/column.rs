//! Who takes part.

use super::PlegArgs;

/// A column of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Column {
    /// A bare client that acts on the runtime's events.
    EventFloor,
    /// A bare client that acts on the death of the process.
    KernelFloor,
    /// keblet as it is.
    Evented,
    /// keblet without BPF and pidfds.
    NoKernel,
    /// keblet, polling each second and without any sensor.
    Relist,
    /// Another agent: its name and command.
    Peer(String, String),
}

impl Column {
    /// The columns that `args` asks for, floors first.
    pub(super) fn chosen(args: &PlegArgs) -> anyhow::Result<Vec<Self>> {
        let peers = args.peers.iter().map(|peer| Self::Peer(peer.name.clone(), peer.command.clone()));
        let own = [Self::EventFloor, Self::KernelFloor, Self::Evented, Self::NoKernel, Self::Relist];
        let all: Vec<_> = own.into_iter().chain(peers).collect();
        args.common.choose(all, Self::name)
    }

    /// As the table spells it.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::EventFloor => "event floor",
            Self::KernelFloor => "kernel floor",
            Self::Evented => "evented",
            Self::NoKernel => "no kernel",
            Self::Relist => "relist",
            Self::Peer(name, _) => name,
        }
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

    fn chosen(args: &[&str]) -> anyhow::Result<Vec<String>> {
        let args = Cli::try_parse_from(std::iter::once(&"bench").chain(args)).unwrap().pleg;
        Ok(Column::chosen(&args)?.iter().map(|column| column.name().to_owned()).collect())
    }

    #[test]
    fn columns_are_chosen_by_name() {
        assert_eq!(
            chosen(&["--peer", "go=k {config}"]).unwrap(),
            ["event floor", "kernel floor", "evented", "no kernel", "relist", "go"]
        );
        assert_eq!(chosen(&["--column", "relist,event floor"]).unwrap(), ["event floor", "relist"]);
        let unknown = chosen(&["--column", "eventfloor"]).unwrap_err().to_string();
        assert!(unknown.contains("event floor, kernel floor"), "{unknown}");
        assert!(chosen(&["--peer", "relist=k {config}"]).is_err());
    }
}
