//! Node agents of the cluster under measurement: their configuration and command lines.

use std::path::Path;

use anyhow::Context as _;
use serde_json::json;

use super::ClusterArgs;
use super::session::Column;
use crate::agent;
use crate::agent::Agent;
use crate::agent::Ports;
use keblet::runtime::RuntimeEndpoint;

/// Starts the agent of a column with its files in `folder`.
pub(super) fn start(
    column: &Column,
    keblet: &Path,
    endpoint: &RuntimeEndpoint,
    folder: &Path,
    args: &ClusterArgs,
) -> anyhow::Result<Agent> {
    let ports = Ports::free()?;
    let mut config = agent::kubelet_configuration(folder, endpoint, args.pods.max(args.idle_pods), &ports);
    config["staticPodPath"] = json!("");
    config["enableControllerAttachDetach"] = json!(true);
    let path = folder.join("config.yaml");
    std::fs::write(&path, config.to_string()).with_context(|| format!("cannot write {}", path.display()))?;
    let line = match column {
        Column::Peer(_, template) => template.clone(),
        _ => format!("{} {KEBLET_FLAGS}", agent::quoted(keblet)),
    };
    let mut line = line
        .replace("{config}", &agent::quoted(&path))
        .replace("{root}", &agent::quoted(&folder.join("root")))
        .replace("{kubeconfig}", &agent::quoted(&args.node_kubeconfig))
        .replace("{node}", &args.node_name);
    match args.node_ip {
        Some(ip) => line = line.replace("{ip}", &ip.to_string()),
        None => line = line.replace("--node-ip={ip}", ""),
    }
    Agent::launch(column.name(), agent::shell(&line), folder, &ports)
}

/// The same that a peer would be given.
const KEBLET_FLAGS: &str = "run --config={config} --root-dir={root} --cert-dir={root}/pki --kubeconfig={kubeconfig} \
                            --hostname-override={node} --node-ip={ip}";
