//! Starting the sensors that the configuration asks for.

use std::sync::Arc;

use tokio::sync::mpsc;
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
use crate::runtime::Runtime;

/// Running sensors.
pub(super) struct Sensing {
    /// Proves that processes are gone.
    pub watch: Arc<dyn ProcessWatch>,
    /// The loaded probes; they stay attached as long as this, or the stream of their records, lives.
    pub probes: Option<Probes>,
}

/// Where sensors report what is no hint.
pub(super) struct Reports<'a> {
    /// State of every sensor.
    pub sensor_states: SensorStates,
    /// Metrics.
    pub metrics: &'a Arc<Metrics>,
}

/// Starts the sensors that are enabled. One that cannot start is reported in its state.
pub(super) async fn start(
    settings: &Settings,
    runtime: &Runtime,
    hierarchies: &Hierarchies,
    cgroups: Option<&Cgroups>,
    reports: Reports<'_>,
    hints: mpsc::Sender<Hint>,
    shutdown: CancellationToken,
) -> Sensing {
    let sensors = &settings.keblet.sensors;
    let sensor_states = reports.sensor_states;
    let hierarchy = hierarchies.containers.clone().ok_or(HierarchyError::None);
    let probes = match &hierarchy {
        Ok(hierarchy) if sensors.bpf => {
            let cgroup_root = root(cgroups);
            let metrics = reports.metrics.clone();
            let (btf, log) = (btf::VMLINUX.into(), KMSG.into());
            let (exits_ring, announce_containers) = (None, false);
            let options = KernelOptions { cgroup_root, btf, log, exits_ring, announce_containers, metrics };
            kernel::start(options, hierarchy.clone(), hints.clone(), sensor_states.clone(), shutdown.clone()).await
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
        oom_fallback::start(options, hierarchy.clone(), hints.clone(), &sensor_states, shutdown.clone());
    }
    let watch: Arc<dyn ProcessWatch> = match hierarchy {
        Ok(hierarchy) if sensors.pidfd => Arc::new(PidfdWatch::new(hierarchy, sensor_states.clone(), probes.is_some())),
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
        tokio::spawn(cri::follow(
            runtime.clone(),
            hints,
            sensor_states,
            Clock::System,
            reports.metrics.clone(),
            shutdown,
        ));
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
