//! The pause before a failed watch or request of a single object is tried again. Pure: the jitter is an argument.
//!
//! Not the pauses of watches of many objects (`agent/src/apiserver/pauses.rs`): a success ends a row of errors here at
//! once, and a first 403 is expected, since the node authorizer is late.

use std::time::Duration;

use crate::apiserver::pauses::FIRST_PAUSE;
use crate::apiserver::pauses::LAST_PAUSE;
use crate::model::Backoff;

/// The node authorizer receives a pod, and with it the right to read its objects, a moment after the node does: the
/// first 403 is retried soon.
const FIRST_REFUSED: Duration = Duration::from_millis(10);

/// Doubling delays between attempts.
#[derive(Debug)]
pub(super) struct Retry {
    failed: Backoff,
    refused: Backoff,
}

impl Default for Retry {
    fn default() -> Self {
        Self { failed: Backoff::new(FIRST_PAUSE, LAST_PAUSE), refused: Backoff::new(FIRST_REFUSED, FIRST_PAUSE) }
    }
}

impl Retry {
    /// The next delay. `refused`: the answer was 403. `jitter` is between 0 and 1 and adds up to the delay's own
    /// length.
    pub(super) fn after(&mut self, refused: bool, jitter: f64) -> Duration {
        if refused && let Some(soon) = self.soon() {
            return soon;
        }
        self.failed.failed(jitter).min(LAST_PAUSE)
    }

    /// The next short delay after a 403; `None` when these are used up.
    pub(super) fn soon(&mut self) -> Option<Duration> {
        let delay = self.refused.failed(0.0);
        (delay < FIRST_PAUSE).then_some(delay)
    }

    /// The short delays after a 403 are used up: the node authorizer is not merely late.
    pub(super) fn is_long_refused(&self) -> bool {
        self.refused.pause() >= FIRST_PAUSE
    }

    /// An attempt succeeded.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_403_is_retried_soon_and_other_errors_later() {
        let mut retry = Retry::default();
        assert!(!retry.is_long_refused());
        let mut refusals = Vec::new();
        for refusal in 1..=9 {
            refusals.push(retry.after(true, 0.0).as_millis());
            assert_eq!(retry.is_long_refused(), refusal > 7, "{refusal}");
        }
        assert_eq!(refusals, [10, 20, 40, 80, 160, 320, 640, 800, 1600]);
        let mut retry = Retry::default();
        let failures: Vec<u128> = (0..8).map(|_| retry.after(false, 0.0).as_millis()).collect();
        assert_eq!(failures, [800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
        retry.reset();
        assert_eq!(retry.after(false, 0.5), Duration::from_millis(1200));
    }
}
