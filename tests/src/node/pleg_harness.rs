//! Sensors and PLEG without workers: only the test acts on the runtime.

use std::sync::Arc;
use std::time::Duration;

use keblet::events::HINT_CAPACITY;
use keblet::events::cri;
use keblet::events::process::NoProcessWatch;
use keblet::events::process::ProcessWatch;
use keblet::events::sensors::RelistPeriods;
use keblet::events::sensors::Sensor;
use keblet::events::sensors::SensorState;
use keblet::events::sensors::SensorStates;
use keblet::metrics::Metrics;
use keblet::model::Clock;
use keblet::oom::OomReporter;
use keblet::pipeline::Observation;
use keblet::pipeline::observe;
use keblet::pleg::PlegHandle;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeOptions;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::kernel;
use super::seen::Seen;
use crate::cri::SimRuntime;

/// Sensors of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SensorSet {
    /// The runtime's event stream.
    pub events: bool,
    /// Pidfds of container inits.
    pub pidfd: bool,
    /// Exit and OOM probes.
    pub probes: bool,
}

impl SensorSet {
    /// All sensors.
    pub const ALL: Self = Self { events: true, pidfd: true, probes: true };
    /// Only runtime events.
    pub const EVENTS: Self = Self { events: true, pidfd: false, probes: false };
    /// Only relists.
    pub const LISTS: Self = Self { events: false, pidfd: false, probes: false };
}

/// The agent's clock on a simulated node.
pub(super) fn clock(sim: &SimRuntime) -> Clock {
    clock_behind(sim, Duration::ZERO)
}

/// A clock that is so much behind that of the simulated node.
pub(super) fn clock_behind(sim: &SimRuntime, behind: Duration) -> Clock {
    let start = sim.clock().start();
    Clock::Derived { origin: sim.clock().wall(start) - behind, start }
}

/// The agent's runtime client, connected in memory.
pub fn runtime(sim: &SimRuntime, options: RuntimeOptions) -> Runtime {
    let endpoint = sim.memory();
    let connect = move || {
        let endpoint = endpoint.clone();
        async move { endpoint.connect().await }
    };
    Runtime::with_connector("memory:///runtime.sim", connect, options)
}

/// Sensors and PLEG of one agent. Dropping it stops them at once, as SIGKILL does.
pub struct PlegHarness {
    /// The pod cache.
    pub pleg: PlegHandle,
    /// States of the sensors.
    pub sensor_states: SensorStates,
    /// Recorded reports of the PLEG.
    pub seen: Seen,
    _tasks: JoinSet<()>,
}

impl PlegHarness {
    /// Starts sensors and PLEG on a node.
    pub fn open(sim: &SimRuntime, sensors: SensorSet) -> Self {
        Self::open_on(sim, sensors, &runtime(sim, RuntimeOptions::default()), Seen::default(), OomReporter::default())
    }

    /// Starts sensors and PLEG on a node, with this client and reports recorded in `seen`, those of OOM kills also sent to
    /// `ooms`.
    pub fn open_on(sim: &SimRuntime, sensors: SensorSet, runtime: &Runtime, seen: Seen, ooms: OomReporter) -> Self {
        let sensor_states = SensorStates::default();
        let (hints, hints_in) = mpsc::channel(HINT_CAPACITY);
        let shutdown = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let watch: Arc<dyn ProcessWatch> = if sensors.pidfd { kernel::shared(sim) } else { Arc::new(NoProcessWatch) };
        let observation = Observation {
            hints: hints_in,
            watch,
            sensor_states: sensor_states.clone(),
            periods: RelistPeriods::default(),
            observer: Arc::new(seen.clone()),
            clock: clock(sim),
            ooms: ooms.clone(),
        };
        tasks.spawn(seen.clone().follow(ooms.subscribe()));
        if sensors.events {
            let (hints, sensor_states, metrics) = (hints.clone(), sensor_states.clone(), Metrics::new());
            tasks.spawn(cri::follow(runtime.clone(), hints, sensor_states, clock(sim), metrics, shutdown.clone()));
        } else {
            sensor_states.set(Sensor::RuntimeEvents, SensorState::Off);
        }
        if sensors.probes {
            tasks.spawn(kernel::follow_kernel(sim.kernel().subscribe(), hints));
        }
        let (pleg, task) = observe(runtime.clone(), observation, shutdown.clone());
        // The guard stops the PLEG, which runs in a task of its own, together with the sensors.
        let guard = shutdown.drop_guard();
        tasks.spawn(async move {
            let _guard = guard;
            let _ = task.await;
        });
        Self { pleg, sensor_states, seen, _tasks: tasks }
    }
}
