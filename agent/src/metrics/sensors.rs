//! State and losses of the sensors.

use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;

use super::register::Register;

/// The sensors.
#[derive(Debug)]
pub struct Sensors {
    state: IntGaugeVec,
    dropped: IntCounterVec,
}

/// State of a sensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SensorLevel {
    /// Working.
    Up,
    /// Working, with a loss.
    Degraded,
    /// Not working.
    Down,
    /// Switched off.
    Off,
}

impl SensorLevel {
    const ALL: [Self; 4] = [Self::Up, Self::Degraded, Self::Down, Self::Off];

    /// The label value.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Degraded => "degraded",
            Self::Down => "down",
            Self::Off => "off",
        }
    }

    /// The level of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|level| level.as_str() == name)
    }
}

impl Sensors {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            state: register.gauges(
                "keblet_sensor_state",
                "1 for the state each sensor is in, 0 for the others.",
                &["sensor", "state"],
            ),
            dropped: register.counters(
                "keblet_hints_dropped_total",
                "Hints and kernel records that were dropped because a buffer was full; a relist follows each loss.",
                &["queue"],
            ),
        }
    }

    /// A sensor is in this state now.
    pub fn state(&self, sensor: &str, level: SensorLevel) {
        for each in SensorLevel::ALL {
            self.state.with_label_values(&[sensor, each.as_str()]).set((each == level).into());
        }
    }

    /// Hints or records were lost in `queue`.
    pub fn dropped(&self, queue: &'static str, count: u64) {
        self.dropped.with_label_values(&[queue]).inc_by(count);
    }
}
