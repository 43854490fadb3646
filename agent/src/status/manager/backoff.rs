//! Back-off of failed requests about a pod. Pure.

use std::time::Duration;

use crate::model::backoff_delay;

const FIRST: Duration = Duration::from_millis(100);
const LAST: Duration = Duration::from_secs(10);
/// Longer than a watch lags behind.
const ABSENT_FIRST: Duration = Duration::from_secs(10);
/// With the period of reconciling on top, at most a minute passes until the pod is read again.
const ABSENT_LAST: Duration = Duration::from_secs(50);

/// The delay after this many consecutive failures: doubling from 100 ms to 10 s, cut by up to half. `jitter` is in `[0, 1)`.
pub fn after(failures: u32, jitter: f64) -> Duration {
    backoff_delay(FIRST, LAST, failures).mul_f64(1.0 - jitter / 2.0)
}

/// How long a pod is left alone after this many answers in a row that it does not exist: doubling from 10 s to 50 s.
pub(super) fn while_absent(answers: u32) -> Duration {
    backoff_delay(ABSENT_FIRST, ABSENT_LAST, answers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_a_limit() {
        let full = [1, 2, 3, 7, 8, 9, u32::MAX].map(|failures| after(failures, 0.0).as_millis());
        assert_eq!(full, [100, 200, 400, 6_400, 10_000, 10_000, 10_000]);
        assert_eq!(after(1, 0.5), Duration::from_millis(75));
        assert_eq!(after(0, 0.0), FIRST);
        assert_eq!([1, 2, 3, 4, u32::MAX].map(|answers| while_absent(answers).as_secs()), [10, 20, 40, 50, 50]);
    }
}
