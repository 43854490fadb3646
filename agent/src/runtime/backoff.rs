//! Capped exponential delays between attempts to reach the runtime.

use std::time::Duration;

/// First delay, and the longest one.
const FIRST: Duration = Duration::from_millis(100);
const CAP: Duration = Duration::from_secs(3);

/// Delays that double from 100 ms up to 3 s and stay there. There is one client per socket, so nothing is randomised.
#[derive(Clone, Debug)]
pub struct Backoff {
    next: Duration,
}

impl Backoff {
    /// Starts with the shortest delay.
    pub fn new() -> Self {
        Self { next: FIRST }
    }

    /// How long to wait before the next attempt; the one after that waits twice as long.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(CAP);
        delay
    }

    /// An attempt succeeded: starts over.
    pub fn reset(&mut self) {
        self.next = FIRST;
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_cap_and_start_over() {
        let mut backoff = Backoff::new();
        let delays: Vec<_> = (0..7).map(|_| backoff.next_delay().as_millis()).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3000, 3000]);
        backoff.reset();
        assert_eq!(backoff.next_delay(), FIRST);
    }
}
