//! Times of `CLOCK_BOOTTIME` in nanoseconds, as in records of probes. The clock differs from the agent's monotonic clock by
//! the time the machine was suspended.

use std::time::Duration;

use nix::time::ClockId;
use tokio::time::Instant;

use crate::model::KernelMoment;

/// Nanoseconds of `CLOCK_BOOTTIME`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(pub u64);

impl BootTime {
    /// The present time; `None` on kernels without that clock.
    pub fn now() -> Option<Self> {
        let now = nix::time::clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?;
        let seconds = u64::try_from(now.tv_sec()).ok()?;
        let nanos = u64::try_from(now.tv_nsec()).ok()?;
        Some(Self(seconds.checked_mul(1_000_000_000)?.checked_add(nanos)?))
    }

    /// Time from this moment to `later`, zero if that is earlier.
    pub fn until(self, later: Self) -> Duration {
        Duration::from_nanos(later.0.saturating_sub(self.0))
    }

    /// The same time on the agent's clock, if `boot_now` and `now` were read together.
    pub fn to_moment(self, boot_now: Self, now: Instant) -> KernelMoment {
        KernelMoment(now.checked_sub(self.until(boot_now)).unwrap_or(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_monotonic() {
        let first = BootTime::now().expect("Linux has a boot clock");
        let second = BootTime::now().expect("Linux has a boot clock");
        assert!(second >= first);
        assert!(first.until(second) < Duration::from_secs(60));
        assert_eq!(BootTime(5).until(BootTime(3)), Duration::ZERO);
    }

    #[test]
    fn converts_to_the_agents_clock() {
        let now = Instant::now() + Duration::from_secs(10);
        let moment = BootTime(4_000_000_000).to_moment(BootTime(5_500_000_000), now);
        assert_eq!(moment.age(now), Duration::from_millis(1500));
        let future = BootTime(9).to_moment(BootTime(3), now);
        assert_eq!(future.age(now), Duration::ZERO);
    }
}
