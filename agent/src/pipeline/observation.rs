//! The PLEG and its inputs.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::events::Hint;
use crate::events::process::ProcessWatch;
use crate::events::sensors::RelistPeriods;
use crate::events::sensors::SensorStates;
use crate::model::Clock;
use crate::oom::OomReporter;
use crate::pleg;
use crate::pleg::PlegConfig;
use crate::pleg::PlegHandle;
use crate::pleg::PlegObserver;
use crate::runtime::Runtime;

/// Inspections of single pods at the same time.
const PARALLEL_INSPECTIONS: usize = 64;
/// A runtime that takes longer to describe one pod counts as failing for that pod.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// Inputs of the PLEG.
pub struct Observation {
    /// Hints of all sensors.
    pub hints: mpsc::Receiver<Hint>,
    /// Proves that processes are gone.
    pub watch: Arc<dyn ProcessWatch>,
    /// States of the sensors.
    pub sensor_states: SensorStates,
    /// How often all pods are listed.
    pub periods: RelistPeriods,
    /// Metrics of the PLEG.
    pub observer: Arc<dyn PlegObserver>,
    /// The wall clock.
    pub clock: Clock,
    /// Reports OOM verdicts.
    pub ooms: OomReporter,
}

/// Starts the PLEG. Its task ends when `shutdown` is cancelled.
pub fn observe(
    runtime: Runtime,
    observation: Observation,
    shutdown: CancellationToken,
) -> (PlegHandle, JoinHandle<()>) {
    let Observation { hints, watch, sensor_states, periods, observer, clock, ooms } = observation;
    let config = PlegConfig {
        periods,
        parallel_inspections: PARALLEL_INSPECTIONS,
        inspection_timeout: INSPECTION_TIMEOUT,
        watch,
        observer,
        clock,
        sensor_states,
        ooms,
    };
    pleg::start(runtime, hints, config, shutdown)
}
