//! The event recorder, and the events of the agent's own start.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::observers::Observers;
use crate::config::Settings;
use crate::model::Clock;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::workers::generate::dns;

const CGROUP_V1: &str = "cgroup v1 detected. cgroup v1 support is deprecated and will be removed in a future release. \
    Please migrate to cgroup v2. More information at \
    https://git.k8s.io/enhancements/keps/sig-node/5573-remove-cgroup-v1";

/// A recorder for this node. Events go to the API server by way of `client`; without one they are log lines.
pub fn start(
    node: &str,
    client: Option<kube::Client>,
    observers: &Arc<Observers>,
    shutdown: &CancellationToken,
) -> Recorder {
    let Some(client) = client else { return Recorder::logging(node) };
    let (recorder, queue) = Recorder::delivering(node, Clock::System, observers.clone());
    tokio::spawn(queue.deliver(client, shutdown.clone()));
    recorder
}

/// Says that the agent starts, and on what it should not run.
pub fn announce(recorder: &Recorder, settings: &Settings, cgroup_version: i64) {
    recorder.node_event(EventType::Normal, "Starting", "Starting kubelet.");
    if let Some(problem) = resolver_problem(settings) {
        recorder.node_event(EventType::Warning, "CheckLimitsForResolvConf", &problem);
    }
    if cgroup_version == 1 {
        recorder.node_event(EventType::Warning, "CgroupV1", CGROUP_V1);
    }
}

/// What pods that use the node's resolver file will miss.
fn resolver_problem(settings: &Settings) -> Option<String> {
    let path = Some(&settings.kubelet.resolv_conf).filter(|path| !path.is_empty())?;
    match std::fs::read_to_string(path) {
        Ok(text) => dns::too_much(&text, path, !settings.kubelet.cluster_domain.is_empty()),
        Err(error) => Some(format!("open {path}: {error}")),
    }
}
