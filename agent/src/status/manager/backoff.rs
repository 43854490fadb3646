//! Back-off of failed requests about a pod. Pure.

use std::time::Duration;

use crate::model::backoff_delay;

const FIRST: Duration = Duration::from_millis(100);
const LAST: Duration = Duration::from_secs(10);
/// Longer than a watch lags behind.
const ABSENT_FIRST: Duration = Duration::from_secs(10);
/// With the period of reconciling on top, at most a minute passes until the pod is read again.
const ABSENT_LAST: Duration = Duration::from_secs(50);
/// The longest pause before a status that has changed. Without it, one that changes all the time would be sent as often
/// while it is refused.
const CHANGED: Duration = Duration::from_secs(1);

/// The delay after this many consecutive failures: doubling from 100 ms to 10 s, cut by up to half. `jitter` is in `[0, 1)`.
pub fn after(failures: u32, jitter: f64) -> Duration {
    backoff_delay(FIRST, LAST, failures).mul_f64(1.0 - jitter / 2.0)
}

/// The pause that is left, from the failure on, of one of this `length`: cut to a second if the status has changed since the
/// attempt. Upstream's status manager sends a changed status at once, and an unchanged one again every 10 s (`syncPeriod`).
pub(super) fn pause(length: Duration, is_changed: bool) -> Duration {
    if is_changed { length.min(CHANGED) } else { length }
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

    #[test]
    fn a_change_ends_a_pause_a_second_after_the_last_attempt() {
        let table = [
            (100, false, 100),
            (100, true, 100),
            (999, true, 999),
            (1_000, true, 1_000),
            (1_001, true, 1_000),
            (9_600, true, 1_000),
            (9_600, false, 9_600),
        ];
        for (length, is_changed, expected) in table {
            let pause = pause(Duration::from_millis(length), is_changed);
            assert_eq!(pause.as_millis(), expected, "{length} ms, changed: {is_changed}");
        }
    }
}
