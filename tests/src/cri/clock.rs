//! The simulated node's clocks, all derived from tokio's: on paused time they advance only when the test does.
//!
//! The system clock is not read after construction, so a run with the same seed has the same times.

use std::time::Duration;
use std::time::SystemTime;
use std::time::UNIX_EPOCH;

use tokio::time::Instant;

/// The clocks of one node.
#[derive(Clone, Copy, Debug)]
pub struct SimClock {
    start: Instant,
    epoch: SystemTime,
}

impl SimClock {
    /// A clock that reads `epoch` now and advances with tokio's clock.
    pub fn starting_at(epoch: SystemTime) -> Self {
        Self { start: Instant::now(), epoch }
    }

    /// The moment the clock was started.
    pub fn start(&self) -> Instant {
        self.start
    }

    /// Wall-clock time of `at`.
    pub fn wall(&self, at: Instant) -> SystemTime {
        self.epoch + at.saturating_duration_since(self.start)
    }

    /// Wall-clock time now.
    pub fn now(&self) -> SystemTime {
        self.wall(Instant::now())
    }

    /// Nanoseconds since the Unix epoch at `at`, the unit of every CRI timestamp.
    pub fn unix_ns(&self, at: Instant) -> i64 {
        let since = self.wall(at).duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    }

    /// Nanoseconds since the Unix epoch now.
    pub fn now_ns(&self) -> i64 {
        self.unix_ns(Instant::now())
    }
}
