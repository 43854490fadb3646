//! Starts the sensors that the configuration enables.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::cgroups::Cgroups;
use crate::cgroups::Hierarchies;
use crate::cgroups::HierarchyError;
use crate::config::Settings;
use crate::events::Hint;
use crate::events::cri;
use crate::events::kernel;
use crate::events::kernel::KernelOptions;
use crate::events::oom_fallback;
use crate::events::oom_fallback::FallbackOptions;
use crate::events::pidfd::PidfdWatch;
use crate::events::process::NoProcessWatch;
use crate::events::process::ProcessWatch;
use crate::events::sensors::Sensor;
use crate::events::sensors::SensorState;
use crate::events::sensors::SensorStates;
use crate::kernel::bpf::Probes;
use crate::kernel::btf;
use crate::kernel::kmsg::KMSG;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::named;
use crate::runtime::Runtime;

/// Running sensors.
pub(super) struct Sensing {
    /// Proves that processes are gone.
    pub watch: Arc<dyn ProcessWatch>,
    /// The loaded probes; they stay attached as long as this, or the stream of their records, lives.
    pub probes: Option<Probes>,
}

/// What the sensors need.
pub(super) struct Parts<'a> {
    /// The configuration.
    pub settings: &'a Settings,
    /// The container runtime.
    pub runtime: &'a Runtime,
    /// The machine's cgroup hierarchies.
    pub hierarchies: &'a Hierarchies,
    /// The cgroups of pods; `None` with `cgroupsPerQOS: false`.
    pub cgroups: Option<&'a Cgroups>,
    /// State of every sensor.
    pub sensor_states: SensorStates,
    /// Metrics.
    pub metrics: &'a Arc<Metrics>,
}

/// Starts the sensors that are enabled, in `tasks`. One that cannot start is reported in its state.
pub(super) async fn start(
    parts: Parts<'_>,
    hints: mpsc::Sender<Hint>,
    tasks: &mut JoinSet<()>,
    shutdown: CancellationToken,
) -> Sensing {
    let Parts { settings, runtime, hierarchies, cgroups, sensor_states, metrics } = parts;
    let sensors = &settings.keblet.sensors;
    let hierarchy = hierarchies.containers.clone().ok_or(HierarchyError::None);
    let probes = match &hierarchy {
        Ok(hierarchy) if sensors.bpf => {
            let cgroup_root = root(cgroups);
            let metrics = metrics.clone();
            let (btf, log) = (btf::VMLINUX.into(), KMSG.into());
            let (exits_ring, announce_containers) = (None, false);
            let options = KernelOptions { cgroup_root, btf, log, exits_ring, announce_containers, metrics };
            let states = sensor_states.clone();
            let loaded = kernel::start(options, hierarchy.clone(), hints.clone(), states, shutdown.clone()).await;
            loaded.map(|(probes, forwarding)| {
                tasks.spawn(named("records of the probes", forwarding));
                probes
            })
        }
        Ok(_) => {
            without_probes(&sensor_states, &SensorState::Off);
            None
        }
        Err(error) => {
            without_probes(&sensor_states, &SensorState::Down(error.to_string()));
            None
        }
    };
    if let Ok(hierarchy) = &hierarchy
        && sensor_states.get(Sensor::Oom) != Some(SensorState::Up)
    {
        let options = FallbackOptions { cgroup_root: root(cgroups), log: KMSG.into() };
        let kills = oom_fallback::start(options, hierarchy.clone(), hints.clone(), &sensor_states, shutdown.clone());
        tasks.spawn(named("OOM kills without probes", kills));
    }
    let watch: Arc<dyn ProcessWatch> = match hierarchy {
        Ok(hierarchy) if sensors.pidfd => Arc::new(PidfdWatch::new(hierarchy, sensor_states.clone())),
        Ok(_) => {
            sensor_states.set(Sensor::Pidfd, SensorState::Off);
            Arc::new(NoProcessWatch)
        }
        Err(error) => {
            sensor_states.set(Sensor::Pidfd, SensorState::Down(error.to_string()));
            Arc::new(NoProcessWatch)
        }
    };
    if sensors.runtime_events {
        let events = cri::follow(runtime.clone(), hints, sensor_states, Clock::System, metrics.clone(), shutdown);
        tasks.spawn(named("events of the runtime", events));
    } else {
        sensor_states.set(Sensor::RuntimeEvents, SensorState::Off);
    }
    Sensing { watch, probes }
}

/// The cgroup of all pods.
fn root(cgroups: Option<&Cgroups>) -> String {
    cgroups.map_or_else(|| "/".to_owned(), Cgroups::kubepods_path)
}

fn without_probes(sensor_states: &SensorStates, state: &SensorState) {
    for sensor in [Sensor::Exits, Sensor::Oom, Sensor::Cgroups, Sensor::Reclaim] {
        sensor_states.set(sensor, state.clone());
    }
}
