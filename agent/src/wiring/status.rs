//! Statuses on their way to the API server, if there is one.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::restart::RestartGates;
use crate::pacing::FirstStatusHold;
use crate::status::NodeAddresses;
use crate::status::Statuses;
use crate::status::manager::KubePods;
use crate::status::manager::StatusManager;
use crate::sync::Mirrors;
use crate::sync::SharedPods;

/// What statuses and mirror pods are made with.
pub struct StatusParts {
    /// The runtime's name, the part of container ids before `://`.
    pub runtime_name: String,
    /// Addresses of the node, none while unknown.
    pub addresses: watch::Receiver<NodeAddresses>,
    /// The own Node object as the API has it.
    pub node: watch::Receiver<Option<Arc<Node>>>,
    /// Client of the API server; `None` when standalone.
    pub client: Option<kube::Client>,
    /// Feature gates of restarts.
    pub gates: RestartGates,
    /// Holds back first statuses.
    pub first_status: FirstStatusHold,
}

/// The board, and the mirror pods' keeper; starts the manager if there is an API server to tell.
pub fn start(
    parts: StatusParts,
    shared: &SharedPods,
    metrics: &Arc<Metrics>,
    shutdown: &CancellationToken,
) -> (Statuses, Mirrors) {
    let statuses = Statuses::new(parts.runtime_name, parts.addresses, parts.gates);
    let Some(client) = parts.client else { return (statuses, Mirrors::none()) };
    let api = Arc::new(KubePods::new(client));
    let statuses = statuses.with_api(Arc::new(shared.clone()));
    if let Some(api_view) = statuses.api_view() {
        let manager = StatusManager {
            statuses: statuses.clone(),
            api_view,
            api: api.clone(),
            first_status: parts.first_status,
            clock: Clock::System,
            metrics: metrics.clone(),
        };
        tokio::spawn(manager.run(shutdown.clone()));
    }
    (statuses, Mirrors::new(api, parts.node))
}
