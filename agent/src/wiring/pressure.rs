//! Connects the sensors of pressure to the kernel's files, to the pods' cgroups and to the metrics.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::cgroups::Cgroups;
use crate::cgroups::Layout;
use crate::cgroups::usage::CgroupPlace;
use crate::config::pressure::PressureScope;
use crate::config::pressure::Trigger;
use crate::events::pods_memory;
use crate::events::pressure;
use crate::events::pressure::ReadThrottled;
use crate::events::sensors::SensorStates;
use crate::kernel::bpf::Stalls;
use crate::metrics::Metrics;
use crate::metrics::PodStalls;
use crate::metrics::ReadStalls;
use crate::model::PodRef;
use crate::model::QosClass;
use crate::model::named;
use crate::model::pod_ref;
use crate::model::qos::qos_class;
use crate::pressure::ReclaimStalls;
use crate::pressure::own_limit::Throttled;
use crate::pressure::pressure_file;
use crate::workers::registry::WorkerRegistry;

/// What the sensors need.
pub(super) struct Parts<'a> {
    /// `pressure.triggers`
    pub triggers: Vec<Trigger>,
    /// The machine's cgroup hierarchies.
    pub layout: &'a Layout,
    /// The cgroups of pods; `None` with `cgroupsPerQOS: false`.
    pub cgroups: Option<&'a Cgroups>,
    /// Reclaim that pods must do themselves; `None` without probes.
    pub stalls: Option<ReclaimStalls>,
    /// The pods.
    pub registry: &'a WorkerRegistry,
    /// States of the sensors.
    pub sensor_states: SensorStates,
    /// What is counted.
    pub metrics: &'a Arc<Metrics>,
}

/// What wakes the eviction manager.
pub(super) struct Wakes {
    /// The kernel's triggers of memory. Closed without any.
    pub triggers: mpsc::Receiver<Instant>,
    /// `memory.events` of all pods. Closed with cgroup v1.
    pub memory_events: mpsc::Receiver<Instant>,
}

/// Starts the sensors, in `tasks`.
pub(super) fn start(parts: Parts<'_>, tasks: &mut JoinSet<()>, shutdown: &CancellationToken) -> Wakes {
    let Parts { triggers, layout, cgroups, stalls, registry, sensor_states, metrics } = parts;
    if let (Some(stalls), Some(cgroups)) = (stalls, cgroups) {
        metrics.pressure.read_stalls_by(read_stalls(stalls, cgroups.clone(), registry.clone()));
    }
    let (wake, woken) = mpsc::channel(1);
    let files = triggers.into_iter().map(|trigger| (trigger, file_of(layout, cgroups, &trigger)));
    let sensor = pressure::Parts {
        sensor_states: sensor_states.clone(),
        metrics: metrics.clone(),
        throttled: throttled(layout.clone(), cgroups.cloned(), registry.clone()),
        shutdown: shutdown.clone(),
    };
    pressure::start(files.collect(), &sensor, wake, tasks);
    let (memory_wake, memory_events) = mpsc::channel(1);
    let folder = cgroups.and_then(|cgroups| memory_folder(layout, &cgroups.kubepods_path()));
    tasks.spawn(named("memory of all pods", pods_memory::follow(folder, sensor_states, memory_wake)));
    Wakes { triggers: woken, memory_events }
}

/// The pressure file of a trigger; `None` if this node has none.
fn file_of(layout: &Layout, cgroups: Option<&Cgroups>, trigger: &Trigger) -> Option<PathBuf> {
    let class = |class| cgroups.map(|cgroups| cgroups.class_path(class));
    let path = match trigger.scope {
        PressureScope::Node => return pressure_file(layout, None, trigger.resource),
        PressureScope::Kubepods => cgroups.map(Cgroups::kubepods_path),
        PressureScope::Burstable => class(QosClass::Burstable),
        PressureScope::BestEffort => class(QosClass::BestEffort),
    };
    pressure_file(layout, Some(&path?), trigger.resource)
}

/// The folder of a cgroup of v2.
fn memory_folder(layout: &Layout, path: &str) -> Option<PathBuf> {
    let mount = layout.mount_of("memory").filter(|_| layout.is_v2())?;
    Some(mount.join(path.trim_start_matches('/')))
}

/// Reads the reclaim stalls of the pods with a worker.
fn read_stalls(stalls: ReclaimStalls, cgroups: Cgroups, registry: WorkerRegistry) -> ReadStalls {
    Box::new(move || {
        let of_pod = |(pod, path): (PodRef, String)| {
            let Stalls { count, time } = stalls.of_pod(&path)?;
            let (uid, namespace, pod) = (pod.uid.to_string(), pod.namespace.to_string(), pod.name.to_string());
            Some(PodStalls { uid, namespace, pod, count, time })
        };
        pods_with_cgroups(&cgroups, &registry).filter_map(of_pod).collect()
    })
}

/// Reads for how long CPU quotas have throttled the pods with a worker.
fn throttled(layout: Layout, cgroups: Option<Cgroups>, registry: WorkerRegistry) -> ReadThrottled {
    Arc::new(move || {
        let Some(cgroups) = &cgroups else { return Throttled::default() };
        let pods = pods_with_cgroups(cgroups, &registry);
        pods.map(|(pod, path)| {
            let name = format!("{}/{}", pod.namespace, pod.name);
            (name, CgroupPlace::at(&layout, &path).throttled())
        })
        .collect()
    })
}

/// Pods with a worker, and the paths of their cgroups.
fn pods_with_cgroups(cgroups: &Cgroups, registry: &WorkerRegistry) -> impl Iterator<Item = (PodRef, String)> + use<> {
    let cgroups = cgroups.clone();
    let pods = registry.summaries().into_values().filter_map(|worker| worker.pod);
    pods.filter_map(move |pod| {
        let name = pod_ref(&pod);
        let path = cgroups.parent_for_runtime(qos_class(&pod).ok()?, name.uid.as_str()).ok()?;
        Some((name, path))
    })
}
