//! Connects the eviction manager to the node, its pods and the kernel's notifications.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::pressure;
use super::pressure::Wakes;
use crate::cgroups::Cgroups;
use crate::cgroups::Layout;
use crate::config::Settings;
use crate::config::eviction::thresholds;
use crate::config::pressure::PressureScope;
use crate::events::sensors::SensorStates;
use crate::eviction::Manager;
use crate::eviction::NodePods;
use crate::eviction::Parts;
use crate::eviction::Policy;
use crate::eviction::Sources;
use crate::eviction::ThisNode;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::Pressures;
use crate::model::named;
use crate::pipeline::NodeGarbage;
use crate::pipeline::Running;
use crate::pressure::PressureReader;
use crate::pressure::ReclaimStalls;
use crate::recorder::Recorder;
use crate::runtime::Runtime;
use crate::stats::Stats;
use crate::sync::SharedPods;

/// Services of the eviction manager.
pub(super) struct Services<'a> {
    /// The configuration.
    pub settings: &'a Settings,
    /// The machine's cgroup hierarchies.
    pub layout: Layout,
    /// Where pods are observed.
    pub watched: Watched,
    /// The container runtime.
    pub runtime: Runtime,
    /// Usage of pods.
    pub stats: Stats,
    /// The pods.
    pub running: &'a Running,
    /// Those that are desired.
    pub desired: SharedPods,
    /// What can be removed.
    pub garbage: NodeGarbage,
    /// The sensors.
    pub sensor_states: SensorStates,
    /// The conditions of the node.
    pub pressures: watch::Sender<Pressures>,
    /// Events.
    pub recorder: Recorder,
    /// What is counted.
    pub metrics: Arc<Metrics>,
}

/// Where pods are observed.
pub(super) struct Watched {
    /// Their cgroups; `None` with `cgroupsPerQOS: false`.
    pub cgroups: Option<Cgroups>,
    /// Reclaim that they must do themselves; `None` without probes.
    pub stalls: Option<ReclaimStalls>,
}

/// Starts the manager in `tasks`. Completes when evictions that an earlier agent has not finished are in effect; until then
/// no pod may be started.
pub(super) async fn start(services: Services<'_>, tasks: &mut JoinSet<()>, shutdown: CancellationToken) {
    let settings = services.settings;
    warn_of_scopes(settings, services.layout.is_v2());
    let Watched { cgroups, stalls } = services.watched;
    let kubepods = cgroups.as_ref().map(Cgroups::kubepods_path);
    let pressure = pressure::Parts {
        triggers: settings.keblet.pressure.triggers(),
        layout: &services.layout,
        cgroups: cgroups.as_ref(),
        stalls: stalls.clone(),
        registry: &services.running.registry,
        sensor_states: services.sensor_states,
        metrics: &services.metrics,
    };
    let Wakes { triggers, memory_events } = pressure::start(pressure, tasks, &shutdown);
    let sources = Sources {
        pressure: PressureReader::new(services.layout.clone(), kubepods.clone(), stalls),
        layout: services.layout,
        kubepods,
        cgroups,
        root: settings.flags.root_dir.clone(),
        runtime: services.runtime,
        stats: services.stats,
        volumes: services.running.volumes.clone(),
        garbage: services.garbage,
        min_image_age: settings.kubelet.image_minimum_gc_age.std(),
        memory_available: settings.keblet.eviction.memory_available,
    };
    let pods = NodePods {
        registry: services.running.registry.clone(),
        evictions: services.running.evictions(),
        statuses: services.running.statuses.clone(),
        desired: services.desired,
    };
    let preparing = Manager::prepare(Parts {
        policy: policy(settings),
        observe: ThisNode::new(sources),
        pods,
        journal: services.running.journal.clone(),
        wake: triggers,
        memory_events,
        clock: Clock::System,
        pressures: services.pressures,
        recorder: services.recorder,
        metrics: services.metrics,
    });
    let Some(manager) = shutdown.run_until_cancelled(preparing).await else { return };
    tasks.spawn(named("eviction manager", manager.run(shutdown)));
}

/// Names policies that this node has no pressure for.
fn warn_of_scopes(settings: &Settings, is_v2: bool) {
    let policies = settings.keblet.pressure.policies();
    for policy in policies.iter().filter(|policy| policy.scope == PressureScope::Kubepods && !is_v2) {
        tracing::warn!(policy = policy.name, "the policy never applies: only cgroup v2 has the pressure of all pods");
    }
}

fn policy(settings: &Settings) -> Policy {
    let kubelet = &settings.kubelet;
    Policy {
        thresholds: thresholds(kubelet, settings.flags.experimental_allocatable_ignore_eviction),
        transition: kubelet.eviction_pressure_transition_period.std(),
        max_pod_grace: kubelet.eviction_max_pod_grace_period.into(),
        local_storage: kubelet.local_storage_capacity_isolation,
        pressure: settings.keblet.pressure.policies(),
    }
}
