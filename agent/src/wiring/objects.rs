//! The cache of API objects that pods refer to.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::apiserver::ApiServer;
use crate::config::Settings;
use crate::model::Clock;
use crate::objects::Objects;
use crate::objects::ObjectsConfig;
use crate::objects::Strategy;

/// The objects module with its configuration; without an API server it has no objects. `node` is the last received Node
/// object. A panic of one of its watches is raised in `tasks`.
pub(super) fn start(
    settings: &Settings,
    api: Option<&ApiServer>,
    node: Option<watch::Receiver<Option<Arc<Node>>>>,
    tasks: &mut JoinSet<()>,
) -> Objects {
    let Some(api) = api else { return Objects::standalone() };
    let kubelet = &settings.kubelet;
    let strategy = match kubelet.config_map_and_secret_change_detection_strategy.as_str() {
        "Cache" => Strategy::Cache,
        "Get" => Strategy::Get,
        // Validation lets nothing else through.
        _ => Strategy::Watch,
    };
    let (recovered, sync_frequency) = (api.recovered(), kubelet.sync_frequency.std());
    let config = ObjectsConfig { strategy, recovered, sync_frequency, clock: Clock::System, node };
    let objects = Objects::new(&api.main, config);
    tasks.spawn(objects.raise_panics());
    objects
}
