//! Time is an input. Code that needs the wall clock takes a `Clock`; monotonic time is tokio's `Instant`, which
//! tests pause.

use std::time::Duration;
use std::time::SystemTime;

use tokio::time::Instant;

/// Reads the wall clock, or derives it from monotonic time: in tests, which pause it, and where a clock that is set must not
/// change what is counted.
#[derive(Clone, Copy, Debug)]
pub enum Clock {
    /// The machine's own clock.
    System,
    /// Wall time that advances with tokio's clock from a fixed origin.
    Derived {
        /// Wall time at `start`.
        origin: SystemTime,
        /// The monotonic moment of `origin`.
        start: Instant,
    },
}

impl Clock {
    /// A clock that starts at `origin` now and advances with tokio's (possibly paused) time.
    pub fn derived(origin: SystemTime) -> Self {
        Self::Derived { origin, start: Instant::now() }
    }

    /// Wall-clock time.
    pub fn wall(&self) -> SystemTime {
        match self {
            Self::System => SystemTime::now(),
            Self::Derived { origin, start } => *origin + start.elapsed(),
        }
    }

    /// Wall-clock time in nanoseconds since the Unix epoch, the unit of CRI timestamps.
    pub fn wall_nanos(&self) -> i64 {
        nanos(self.wall())
    }

    /// Monotonic time.
    pub fn now(&self) -> Instant {
        Instant::now()
    }

    /// The wall-clock nanoseconds of something that happened `age` ago.
    pub fn wall_nanos_before(&self, age: Duration) -> i64 {
        self.wall_nanos().saturating_sub(i64::try_from(age.as_nanos()).unwrap_or(i64::MAX))
    }
}

/// Sleeps until then; never returns without a time. Cancel-safe.
pub async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn nanos(time: SystemTime) -> i64 {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |n| -n),
    }
}
