//! States of the sensors, and the relist period that follows.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::sync::watch;

/// The sensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Sensor {
    /// CRI `GetContainerEvents`.
    RuntimeEvents,
    /// The BPF exit probe.
    Exits,
    /// pidfd of container init processes.
    Pidfd,
    /// The BPF OOM probe.
    Oom,
    /// The kernel log, for OOM kills without the probe.
    KernelLog,
    /// The BPF cgroup probes.
    Cgroups,
    /// The BPF reclaim counters.
    Reclaim,
    /// Notifications of pressure (PSI).
    Pressure,
    /// `memory.events` of the cgroup of all pods.
    MemoryEvents,
    /// Lists of all pods.
    Relist,
}

impl Sensor {
    /// The name in metrics, `/healthz?verbose` and `keblet doctor`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RuntimeEvents => "runtime-events",
            Self::Exits => "exits",
            Self::Pidfd => "pidfd",
            Self::Oom => "oom",
            Self::KernelLog => "kernel-log",
            Self::Cgroups => "cgroups",
            Self::Reclaim => "reclaim",
            Self::Pressure => "pressure",
            Self::MemoryEvents => "memory-events",
            Self::Relist => "relist",
        }
    }
}

/// State of a sensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SensorState {
    /// Working.
    Up,
    /// Working, with a loss.
    Degraded(String),
    /// Not working.
    Down(String),
    /// Switched off by configuration.
    Off,
}

impl SensorState {
    /// `up`, `degraded`, `down` or `off`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Degraded(_) => "degraded",
            Self::Down(_) => "down",
            Self::Off => "off",
        }
    }

    /// Why it is not up.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Up | Self::Off => None,
            Self::Degraded(reason) | Self::Down(reason) => Some(reason),
        }
    }
}

/// States of all sensors. Cheap to clone; written by the sensors, read by the PLEG, metrics and health pages.
#[derive(Clone, Debug)]
pub struct SensorStates {
    states: Arc<Mutex<BTreeMap<Sensor, SensorState>>>,
    changed: watch::Sender<()>,
}

impl Default for SensorStates {
    fn default() -> Self {
        Self { states: Arc::default(), changed: watch::Sender::new(()) }
    }
}

impl SensorStates {
    /// Sets a sensor's state; logs a change.
    pub fn set(&self, sensor: Sensor, state: SensorState) {
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        if states.get(&sensor) == Some(&state) {
            return;
        }
        match &state {
            SensorState::Up | SensorState::Off => {
                tracing::info!(sensor = sensor.as_str(), state = state.as_str(), "sensor changed");
            }
            SensorState::Degraded(reason) | SensorState::Down(reason) => {
                tracing::warn!(sensor = sensor.as_str(), state = state.as_str(), reason, "sensor changed");
            }
        }
        states.insert(sensor, state);
        drop(states);
        self.changed.send_replace(());
    }

    /// All sensors with their states.
    pub fn report(&self) -> Vec<(Sensor, SensorState)> {
        let states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        states.iter().map(|(sensor, state)| (*sensor, state.clone())).collect()
    }

    /// One sensor's state, if it has reported yet.
    pub fn get(&self, sensor: Sensor) -> Option<SensorState> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner).get(&sensor).cloned()
    }

    /// Notifies of every change.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }
}

/// Relist periods.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RelistPeriods {
    /// While the runtime's events arrive.
    pub event_driven: Duration,
    /// While they do not arrive.
    pub polling: Duration,
    /// Used whatever the state of the sensors, for comparisons.
    pub fixed: Option<Duration>,
}

impl Default for RelistPeriods {
    fn default() -> Self {
        Self { event_driven: Duration::from_secs(300), polling: Duration::from_secs(1), fixed: None }
    }
}

impl RelistPeriods {
    /// The period for the present state of the runtime event sensor.
    pub fn current(&self, runtime_events: Option<&SensorState>) -> Duration {
        match (self.fixed, runtime_events) {
            (Some(fixed), _) => fixed,
            (None, Some(SensorState::Up)) => self.event_driven,
            (None, _) => self.polling,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_event_stream_the_relist_period_is_short() {
        let periods = RelistPeriods::default();
        assert_eq!(periods.current(Some(&SensorState::Up)), periods.event_driven);
        assert_eq!(periods.current(Some(&SensorState::Down("gone".into()))), periods.polling);
        assert_eq!(periods.current(None), periods.polling);
        let fixed = RelistPeriods { fixed: Some(Duration::from_secs(7)), ..periods };
        assert_eq!(fixed.current(Some(&SensorState::Up)), Duration::from_secs(7));
    }

    #[tokio::test]
    async fn only_changes_notify() {
        let sensor_states = SensorStates::default();
        let mut changes = sensor_states.subscribe();
        sensor_states.set(Sensor::Relist, SensorState::Up);
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        sensor_states.set(Sensor::Relist, SensorState::Up);
        assert!(!changes.has_changed().unwrap());
    }
}
