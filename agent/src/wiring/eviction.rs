//! Connects the eviction manager to the node, its pods and the kernel's notifications.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cgroups::Cgroups;
use crate::cgroups::Layout;
use crate::config::Settings;
use crate::config::eviction::thresholds;
use crate::events::pressure;
use crate::events::sensors::SensorBoard;
use crate::eviction::Journal;
use crate::eviction::Manager;
use crate::eviction::NodePods;
use crate::eviction::Parts;
use crate::eviction::Policy;
use crate::eviction::Sources;
use crate::eviction::ThisNode;
use crate::metrics::Metrics;
use crate::model::Pressures;
use crate::pipeline::NodeGarbage;
use crate::pipeline::Running;
use crate::recorder::Recorder;
use crate::runtime::Runtime;
use crate::stats::Stats;

/// Services of the eviction manager.
pub(super) struct Services<'a> {
    /// The configuration.
    pub settings: &'a Settings,
    /// The machine's cgroup hierarchies.
    pub layout: Layout,
    /// The cgroup of all pods; `None` with `cgroupsPerQOS: false`.
    pub kubepods: Option<String>,
    /// The container runtime.
    pub runtime: Runtime,
    /// Usage of pods.
    pub stats: Stats,
    /// The pods.
    pub running: &'a Running,
    /// What can be removed.
    pub garbage: NodeGarbage,
    /// The sensors.
    pub board: SensorBoard,
    /// The conditions of the node.
    pub pressures: watch::Sender<Pressures>,
    /// Events.
    pub recorder: Recorder,
    /// What is counted.
    pub metrics: Arc<Metrics>,
}

/// Starts the manager.
pub(super) fn start(services: Services<'_>, shutdown: CancellationToken) {
    let settings = services.settings;
    let sources = Sources {
        layout: services.layout,
        kubepods: services.kubepods,
        root: settings.flags.root_dir.clone(),
        runtime: services.runtime,
        stats: services.stats,
        volumes: services.running.volumes.clone(),
        garbage: services.garbage,
        min_image_age: settings.kubelet.image_minimum_gc_age.std(),
    };
    let (wake, woken) = mpsc::channel(1);
    tokio::spawn(pressure::follow(Path::new(pressure::MEMORY), services.board, wake));
    let pods = NodePods { registry: services.running.registry.clone(), evictions: services.running.evictions() };
    let manager = Manager::new(Parts {
        policy: policy(settings),
        observe: ThisNode::new(sources),
        pods,
        journal: Journal::open(&settings.flags.root_dir),
        wake: woken,
        pressures: services.pressures,
        recorder: services.recorder,
        metrics: services.metrics,
    });
    tokio::spawn(manager.run(shutdown));
}

/// The path of the cgroup of all pods.
pub(super) fn kubepods(cgroups: Option<&Cgroups>) -> Option<String> {
    cgroups.map(Cgroups::kubepods_path)
}

fn policy(settings: &Settings) -> Policy {
    let kubelet = &settings.kubelet;
    Policy {
        thresholds: thresholds(kubelet, settings.flags.experimental_allocatable_ignore_eviction),
        transition: kubelet.eviction_pressure_transition_period.std(),
        max_pod_grace: kubelet.eviction_max_pod_grace_period.into(),
        local_storage: kubelet.local_storage_capacity_isolation,
    }
}
