//! An agent as a node of a cluster that may run out of memory.

use std::path::Path;

use anyhow::Context as _;
use serde_json::json;

use super::ClusterAccess;
use super::node::NodeRuntime;
use crate::agent;
use crate::agent::Agent;
use crate::agent::Ports;
use crate::participant::Participant;

const KEBLET_FLAGS: &str = "run --config={config} --root-dir={root} --cert-dir={root}/pki --kubeconfig={kubeconfig} \
                            --hostname-override={node} --node-ip={ip}";

/// Starts an agent as a node of the cluster, with one threshold: of memory.available.
///
/// # Errors
/// There is no kubeconfig for the node, or the agent cannot be started.
pub(super) fn launch(
    participant: &Participant,
    node_runtime: &NodeRuntime<'_>,
    cluster: &ClusterAccess,
    available: &str,
    folder: &Path,
) -> anyhow::Result<Agent> {
    let ports = Ports::free();
    let mut config = agent::kubelet_configuration(folder, node_runtime.endpoint, 100, &ports);
    config["staticPodPath"] = json!("");
    config["cgroupsPerQOS"] = json!(true);
    config["cgroupRoot"] = json!(node_runtime.cgroup_root);
    config["evictionHard"] = json!({"memory.available": available});
    // So that the next pod without requests is admitted soon.
    config["evictionPressureTransitionPeriod"] = json!("1s");
    config["logging"] = json!({"format": "json", "verbosity": 2});
    let config = agent::write_configuration(participant, &config, folder)?;
    let kubeconfig = cluster.node_kubeconfig.as_deref().context("no --node-kubeconfig")?;
    let flags = if cluster.node_ip.is_some() { KEBLET_FLAGS } else { KEBLET_FLAGS.trim_end_matches(" --node-ip={ip}") };
    let placeholders = [
        ("{config}", agent::quoted(&config)),
        ("{root}", agent::quoted(&folder.join("root"))),
        ("{kubeconfig}", agent::quoted(kubeconfig)),
        ("{node}", cluster.node_name.clone().unwrap_or_default()),
        ("{ip}", cluster.node_ip.map(|ip| ip.to_string()).unwrap_or_default()),
    ];
    let command = agent::command(participant, node_runtime.keblet, flags, &placeholders);
    Agent::launch(participant.name(), command, folder, &ports)
}

/// Copies the agent's log to the results: it says why a run failed.
///
/// # Errors
/// It cannot be copied.
pub(super) fn keep_log(folder: &Path, output: &Path, name: &str) -> anyhow::Result<()> {
    let (log, kept) = (folder.join("agent.log"), output.join(format!("{name}-agent.log")));
    std::fs::create_dir_all(output)
        .and_then(|()| std::fs::copy(&log, &kept))
        .with_context(|| format!("cannot copy {} to {}", log.display(), kept.display()))?;
    eprintln!("  the agent's log is in {}", kept.display());
    Ok(())
}
