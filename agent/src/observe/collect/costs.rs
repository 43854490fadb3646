//! What an observer cannot report for lack of each source of evidence. Pure.

use crate::events::sensors::Sensor;
use crate::events::sensors::SensorState;
use crate::observe::record::SensorRecord;
use crate::observe::text::clean;

/// Longest reason, in characters.
const REASON: usize = 300;

/// A sensor's state as a record.
pub(super) fn record(sensor: Sensor, state: &SensorState, v2: bool) -> SensorRecord {
    SensorRecord {
        sensor: sensor.as_str().to_owned(),
        state: state.as_str().to_owned(),
        reason: state.reason().map(|reason| clean(reason, REASON)),
        cost: cost(sensor, state, v2).map(str::to_owned),
    }
}

fn cost(sensor: Sensor, state: &SensorState, v2: bool) -> Option<&'static str> {
    if matches!(state, SensorState::Up) {
        return None;
    }
    match sensor {
        Sensor::RuntimeEvents => Some("changes are noticed by kernel records, pidfds and lists of all pods"),
        Sensor::Exits => Some("time and exit code of an exit are the runtime's"),
        Sensor::Pidfd => Some("exits are noticed by kernel records and lists of all pods"),
        Sensor::Oom => Some("OOM kills come from the kernel log, if it may be read"),
        Sensor::KernelLog if v2 => Some("OOM kills are counted from memory.events: no process, no limit"),
        Sensor::KernelLog => Some("OOM kills are counted from memory.oom_control: no process, no limit"),
        Sensor::Cgroups => Some("new containers are noticed by runtime events or lists of all pods"),
        Sensor::Reclaim if v2 => Some("no counts of reclaim stalls; pressure is measured all the same"),
        Sensor::Reclaim => Some("no stalls of pods at all: cgroup v1 measures no pressure of pods"),
        Sensor::Pressure if matches!(state, SensorState::Degraded(_)) => {
            Some("no pressure of pods; waits for memory are counted by the reclaim probe")
        }
        Sensor::Pressure => Some("no pressure of the node and of pods"),
        // The observer evicts nothing.
        Sensor::MemoryEvents => None,
        Sensor::Relist => Some("pods and containers are unknown or out of date"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_not_up_has_a_cost() {
        let sensors = [
            Sensor::RuntimeEvents,
            Sensor::Exits,
            Sensor::Pidfd,
            Sensor::Oom,
            Sensor::KernelLog,
            Sensor::Cgroups,
            Sensor::Reclaim,
            Sensor::Pressure,
            Sensor::Relist,
        ];
        for (sensor, v2) in sensors.into_iter().flat_map(|sensor| [(sensor, true), (sensor, false)]) {
            assert_eq!(record(sensor, &SensorState::Up, v2).cost, None);
            for state in [SensorState::Off, SensorState::Down("x".into()), SensorState::Degraded("x".into())] {
                assert!(record(sensor, &state, v2).cost.is_some(), "{sensor:?} {state:?}");
            }
        }
    }
}
