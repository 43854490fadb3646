//! Participants: bare clients, keblet in several configurations, other agents.

use anyhow::bail;
use serde_json::json;

use super::ClusterArgs;
use super::PlegArgs;
use super::PressureArgs;
use super::common::CommonArgs;
use super::common::Peer;

/// A row of the tables.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Participant {
    /// A bare CRI client that detects exits through a pidfd.
    BareClient,
    /// A bare CRI client that detects exits through the runtime's events.
    EventBareClient,
    /// keblet.
    Keblet {
        name: String,
        /// Second document of its configuration file.
        configuration: Option<String>,
    },
    /// Another agent.
    Peer {
        name: String,
        /// A shell command with placeholders.
        command: String,
    },
}

impl Participant {
    /// Participants of `bench pleg`, bare clients first.
    ///
    /// # Errors
    /// Two have the same name, `--participant` selects none of them, or a peer's command or a variant's file is
    /// unusable.
    pub(crate) fn of_pleg(args: &PlegArgs) -> anyhow::Result<Vec<Self>> {
        let without_sensors = json!({"sensors": {"bpf": false, "pidfd": false}});
        let polling = json!({
            "sensors": {"bpf": false, "pidfd": false, "runtimeEvents": false},
            "relist": {"fixedPeriod": "1s"},
        });
        let own = [
            Self::BareClient,
            Self::EventBareClient,
            Self::keblet(),
            Self::configured("keblet without kernel sensors", without_sensors),
            Self::configured("keblet polling", polling),
        ];
        if let Some(peer) = args.peers.iter().find(|peer| !peer.uses("{config}") && !peer.uses("{manifests}")) {
            bail!(
                "--peer {}: the command uses neither {{config}} nor {{manifests}}, so it cannot receive the pods",
                peer.name
            );
        }
        choose(&args.common, own, &args.peers)
    }

    /// Participants of `bench cluster`, the bare client first.
    ///
    /// # Errors
    /// As for [`Self::of_pleg`].
    pub(crate) fn of_cluster(args: &ClusterArgs) -> anyhow::Result<Vec<Self>> {
        if let Some(peer) = args.peers.iter().find(|peer| !peer.uses("{kubeconfig}")) {
            bail!(
                "--peer {}: the command does not use {{kubeconfig}}, so it cannot be a node of the cluster",
                peer.name
            );
        }
        choose(&args.common, [Self::BareClient, Self::keblet()], &args.peers)
    }

    /// Participants of `bench pressure`.
    ///
    /// # Errors
    /// As for [`Self::of_pleg`].
    pub(crate) fn of_pressure(args: &PressureArgs) -> anyhow::Result<Vec<Self>> {
        if let Some(peer) = args.peers.iter().find(|peer| !peer.uses("{config}")) {
            bail!("--peer {}: the command does not use {{config}}, so it cannot receive the pods", peer.name);
        }
        choose(&args.common, [Self::keblet()], &args.peers)
    }

    /// Participants of a node that is stalled: keblet with a pressure policy, and as it is without.
    ///
    /// # Errors
    /// As for [`Self::of_pleg`].
    pub(crate) fn of_thrash(args: &PressureArgs) -> anyhow::Result<Vec<Self>> {
        let policy = json!({
            "name": "thrash", "mode": "Enforce", "kind": "full", "scope": "node", "threshold": 20,
            "shortWindow": "1s", "longWindow": "5s",
        });
        let with_policy = Self::configured("keblet", json!({"pressure": {"policies": [policy]}}));
        let without = Self::Keblet { name: "keblet without policy".to_owned(), configuration: None };
        choose(&args.common, [with_policy, without], &args.peers)
    }

    /// Name of its row.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::BareClient => "bare client",
            Self::EventBareClient => "bare client (events)",
            Self::Keblet { name, .. } | Self::Peer { name, .. } => name,
        }
    }

    /// Whether it is a bare client, which has no process of its own.
    pub(crate) fn is_bare_client(&self) -> bool {
        matches!(self, Self::BareClient | Self::EventBareClient)
    }

    /// keblet with only the configuration that all agents get.
    pub(crate) fn keblet() -> Self {
        Self::Keblet { name: "keblet".to_owned(), configuration: None }
    }

    fn configured(name: &str, mut settings: serde_json::Value) -> Self {
        settings["apiVersion"] = json!("keblet.dev/v1alpha1");
        settings["kind"] = json!("KebletConfiguration");
        Self::Keblet { name: name.to_owned(), configuration: Some(settings.to_string()) }
    }
}

/// Adds variants and peers, and keeps the selected participants.
fn choose<const N: usize>(
    common: &CommonArgs,
    own: [Participant; N],
    peers: &[Peer],
) -> anyhow::Result<Vec<Participant>> {
    let variants = common.variants()?;
    let peers = peers.iter().map(|Peer { name, command }| {
        let (name, command) = (name.clone(), command.clone());
        Participant::Peer { name, command }
    });
    let all: Vec<_> = own.into_iter().chain(variants).chain(peers).collect();
    let names: Vec<_> = all.iter().map(Participant::name).collect();
    if let Some((_, twice)) = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
        bail!("two participants have the name {twice}");
    }
    if let Some(unknown) = common.participants.iter().find(|selected| !names.contains(&selected.as_str())) {
        bail!("--participant {unknown}: select from {}", names.join(", "));
    }
    let is_selected =
        |name: &str| common.participants.is_empty() || common.participants.iter().any(|selected| selected == name);
    Ok(all.iter().filter(|participant| is_selected(participant.name())).cloned().collect())
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
        Ok(Participant::of_pleg(&args)?.iter().map(|participant| participant.name().to_owned()).collect())
    }

    #[test]
    fn participants_are_chosen_by_name() {
        let all = chosen(&["--peer", "go=k {config}"]).unwrap();
        let own = ["bare client", "bare client (events)", "keblet", "keblet without kernel sensors", "keblet polling"];
        assert_eq!(all[..5], own);
        assert_eq!(all[5], "go");
        assert_eq!(chosen(&["--participant", "keblet,bare client"]).unwrap(), ["bare client", "keblet"]);
        let unknown = chosen(&["--participant", "floor"]).unwrap_err().to_string();
        assert!(unknown.contains("bare client, bare client (events)"), "{unknown}");
        assert!(chosen(&["--peer", "keblet=k {config}"]).is_err());
        assert!(chosen(&["--peer", "k=k --config mine"]).is_err());
    }

    #[test]
    fn a_variant_is_keblet_with_a_second_document() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("variant.yaml");
        std::fs::write(&file, "kind: KebletConfiguration\n").unwrap();
        let variant = format!("without pacing={}", file.display());
        let args = Cli::try_parse_from(["bench", "--agent-variant", &variant]).unwrap().pleg;
        let expected = Participant::Keblet {
            name: "keblet without pacing".to_owned(),
            configuration: Some("kind: KebletConfiguration\n".to_owned()),
        };
        assert!(Participant::of_pleg(&args).unwrap().contains(&expected));
        assert!(chosen(&["--agent-variant", "x=/no/such/file"]).is_err());
    }
}
