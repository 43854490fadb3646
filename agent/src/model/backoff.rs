//! Exponential back-off, the only one of the agent. Pure: jitter is an argument, and nothing sleeps here.

use std::time::Duration;

/// The pause after this many failures in a row: `first`, then doubling up to `max`. `failures` 0 counts as 1.
pub fn delay(first: Duration, max: Duration, failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(31);
    first.saturating_mul(1 << doublings).min(max)
}

/// Back-off of one operation: counts failures in a row, and gives the pause before the next attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    failures: u32,
}

impl Backoff {
    /// Pauses that double from `first` to `max`.
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, failures: 0 }
    }

    /// An attempt failed. Returns the pause before the next, lengthened by `jitter` (0 to 1) times itself.
    pub fn failed(&mut self, jitter: f64) -> Duration {
        self.failures = self.failures.saturating_add(1);
        delay(self.first, self.max, self.failures).mul_f64(1.0 + jitter.clamp(0.0, 1.0))
    }

    /// An attempt succeeded: the next failure is the first again.
    pub fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// The pause after the last failure, without jitter; before the first failure, the first one.
    pub fn pause(&self) -> Duration {
        delay(self.first, self.max, self.failures)
    }

    /// Failures in a row.
    pub const fn failures(&self) -> u32 {
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_maximum_and_start_over() {
        let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(3));
        let pauses: Vec<_> = (0..7).map(|_| backoff.failed(0.0).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3000, 3000]);
        assert_eq!((backoff.failures(), backoff.pause()), (7, Duration::from_secs(3)));
        backoff.succeeded();
        assert_eq!(backoff.failed(0.5), Duration::from_millis(150));
        assert_eq!(backoff.pause(), Duration::from_millis(100), "without jitter");
    }

    #[test]
    fn any_number_of_failures_has_a_pause() {
        let (first, max) = (Duration::from_secs(1), Duration::from_secs(60));
        assert_eq!([0, 1, 2, 7, u32::MAX].map(|failures| delay(first, max, failures).as_secs()), [1, 1, 2, 60, 60]);
    }
}
