//! Connects the Node object's tasks to the runtime, the sensors and the API server.

use std::sync::Arc;

use kube::Api;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::apiserver::ApiServer;
use crate::config::Settings;
use crate::events::sensors::Sensor;
use crate::events::sensors::SensorState;
use crate::events::sensors::SensorStates;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::Pressures;
use crate::model::named;
use crate::model::sleep_until;
use crate::model::until;
use crate::node;
use crate::node::Connections;
use crate::node::Inputs;
use crate::node::LeaseController;
use crate::node::NodeCache;
use crate::node::NodeConfig;
use crate::node::PlegHealth;
use crate::node::RootFs;
use crate::node::StatusLoop;
use crate::node::ThisHost;
use crate::recorder::Recorder;
use crate::runtime::Runtime;
use crate::runtime::RuntimeState;
use crate::status::NodeAddresses;
use crate::volumes::VolumesInUse;

/// Services of the Node object's tasks.
pub(super) struct Parts<'a> {
    /// The configuration.
    pub settings: &'a Settings,
    /// Settings of the object.
    pub config: Arc<NodeConfig>,
    /// The size of the root directory's file system.
    pub root_fs: &'a RootFs,
    /// The container runtime.
    pub runtime: Runtime,
    /// Its state.
    pub state: watch::Receiver<RuntimeState>,
    /// The sensors.
    pub sensor_states: SensorStates,
    /// Grows with every image pulled or removed.
    pub images: watch::Receiver<u64>,
    /// Resources under pressure.
    pub pressures: watch::Receiver<Pressures>,
    /// Names of volumes in use; `None` until they are known.
    pub volumes_in_use: watch::Receiver<VolumesInUse>,
    /// True while the machine shuts down.
    pub shutting_down: watch::Receiver<bool>,
    /// Events of the node.
    pub recorder: Recorder,
    /// What is counted.
    pub metrics: Arc<Metrics>,
}

/// Results of the Node object's tasks.
pub(super) struct NodeHandles {
    /// The own Node as last seen; never one when standalone.
    pub node: watch::Receiver<Option<Arc<k8s_openapi::api::core::v1::Node>>>,
    /// True once the first list of the own Node was complete; never when standalone.
    pub synced: watch::Receiver<bool>,
    /// Addresses of this node; none until they are known.
    pub addresses: watch::Receiver<NodeAddresses>,
}

/// Starts the tasks of the Node object. Without an API server only the node's addresses are determined.
pub(super) fn start(
    parts: Parts<'_>,
    api: Option<&ApiServer>,
    tasks: &mut JoinSet<()>,
    shutdown: CancellationToken,
) -> NodeHandles {
    let config = parts.config;
    let root_dir = parts.settings.flags.root_dir.clone();
    let host = ThisHost::new(parts.runtime, root_dir, parts.root_fs.clone(), config.addresses.clone());
    // The addresses of the flag are used until the host has been inspected.
    let configured = config.addresses.node_ips.iter().filter(|ip| !ip.is_unspecified()).map(ToString::to_string);
    let configured = NodeAddresses { ips: configured.collect(), prefers_v6: config.addresses.prefers_v6() };
    let (addresses_sender, addresses) = watch::channel(configured);
    let cache = NodeCache::default();
    let (node, synced) = (cache.subscribe(), cache.synced());
    let Some(api) = api else {
        let addressing = node::standalone(config, host, addresses_sender);
        tasks.spawn(named("addresses of the node", until(shutdown, addressing)));
        return NodeHandles { node, synced, addresses };
    };
    let nodes = Api::all(api.main.clone());
    let following = node::follow(nodes, config.name.clone(), api.recovered(), cache.clone(), shutdown.clone());
    tasks.spawn(named("watch of the Node", following));
    let connections: Arc<dyn Connections> = Arc::new(api.clone());
    let heartbeat = api.heartbeat.clone();
    let lease = LeaseController::new(config.clone(), heartbeat, cache.clone(), Clock::System, connections.clone());
    tasks.spawn(named("node lease", lease.run(shutdown.clone())));
    let status = StatusLoop::new(Inputs {
        config,
        host,
        main: api.main.clone(),
        heartbeat: api.heartbeat.clone(),
        cache,
        runtime: parts.state,
        health: health(parts.sensor_states, tasks, shutdown.clone()),
        pressures: parts.pressures,
        volumes_in_use: parts.volumes_in_use,
        shutting_down: parts.shutting_down,
        images: parts.images,
        addresses: addresses_sender,
        recorder: parts.recorder,
        connections,
        metrics: parts.metrics,
        clock: Clock::System,
    });
    tasks.spawn(named("node status", status.run(shutdown)));
    NodeHandles { node, synced, addresses }
}

/// What the lists of pods mean for the node's readiness.
fn health(
    sensor_states: SensorStates,
    tasks: &mut JoinSet<()>,
    shutdown: CancellationToken,
) -> watch::Receiver<Vec<String>> {
    let listed = |sensor_states: &SensorStates| {
        sensor_states.get(Sensor::Relist).map(|state| matches!(state, SensorState::Up | SensorState::Degraded(_)))
    };
    let mut changes = sensor_states.subscribe();
    let mut pleg = PlegHealth::default();
    let (sender, health) = watch::channel(pleg.errors(Instant::now()));
    let follow = async move {
        loop {
            let now = Instant::now();
            pleg.observe(listed(&sensor_states), now);
            let errors = pleg.errors(now);
            sender.send_if_modified(|known| std::mem::replace(known, errors.clone()) != errors);
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                () = sleep_until(pleg.due(now)) => {}
            }
        }
    };
    tasks.spawn(named("health of the PLEG", until(shutdown, follow)));
    health
}
