//! The end of `activeDeadlineSeconds` by the wall clock: it may be set, and it goes on while the machine is suspended, when
//! monotonic time does not. Pure.

use std::time::SystemTime;

use tokio::time::Instant;

use super::volume_refresh::CLOCK_CHECK_PERIOD;
use super::volume_refresh::next_full_minute;

/// What a worker waits for between two passes, if its pod has such a limit.
#[derive(Default)]
pub(super) struct ActiveDeadline {
    at: Option<SystemTime>,
}

impl ActiveDeadline {
    /// A pass was made, and the limit ends at `at`. Returns when that is, if the clock is not set until then; nothing if it has
    /// ended: a pass that fails must not begin again at once.
    pub(super) fn set(&mut self, at: Option<SystemTime>, now: Instant, wall: SystemTime) -> Option<Instant> {
        self.at = at.filter(|at| *at > wall);
        self.at.map(|at| due(at, now, wall))
    }

    /// Reads the wall clock. Returns when the limit ends; once, if it has.
    pub(super) fn check_clock(&mut self, now: Instant, wall: SystemTime) -> Option<Instant> {
        let at = self.at?;
        self.at.take_if(|at| *at <= wall);
        Some(due(at, now, wall))
    }

    /// When to read the wall clock next; not while the end is so near that the reading would be later.
    pub(super) fn next_clock_check(&self, now: Instant, wall: SystemTime) -> Option<Instant> {
        let is_far = self.at?.duration_since(wall).is_ok_and(|left| left > CLOCK_CHECK_PERIOD);
        is_far.then(|| next_full_minute(now, wall))
    }
}

fn due(at: SystemTime, now: Instant, wall: SystemTime) -> Instant {
    now + at.duration_since(wall).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const WALL: SystemTime = SystemTime::UNIX_EPOCH;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_clock_that_goes_forward_ends_the_limit() {
        let (mut deadline, now) = (ActiveDeadline::default(), Instant::now());
        assert_eq!(deadline.set(Some(WALL + seconds(1000)), now, WALL), Some(now + seconds(1000)));
        let minute = now + seconds(60);
        assert_eq!(deadline.check_clock(minute, WALL + seconds(60)), Some(now + seconds(1000)), "both clocks agree");
        assert_eq!(deadline.check_clock(minute, WALL + seconds(560)), Some(now + seconds(500)), "set forward");
        assert_eq!(deadline.check_clock(minute, WALL + seconds(1000)), Some(minute), "over after a suspend");
        assert_eq!(deadline.check_clock(minute, WALL + seconds(1000)), None, "said once");
        assert_eq!(deadline.set(Some(WALL + seconds(1000)), minute, WALL + seconds(1000)), None, "the pass has failed");
        assert_eq!(deadline.check_clock(minute, WALL + seconds(1000)), None);
    }

    #[test]
    fn the_clock_is_checked_only_while_the_end_is_more_than_a_minute_away() {
        let (mut deadline, now) = (ActiveDeadline::default(), Instant::now());
        assert_eq!(
            (deadline.check_clock(now, WALL), deadline.next_clock_check(now, WALL)),
            (None, None),
            "the pod has no limit"
        );
        deadline.set(Some(WALL + seconds(100)), now, WALL + seconds(10));
        assert_eq!(deadline.next_clock_check(now, WALL + seconds(10)), Some(now + seconds(50)), "on a full minute");
        assert_eq!(deadline.next_clock_check(now, WALL + seconds(40)), None);
        deadline.set(None, now, WALL);
        assert_eq!(deadline.next_clock_check(now, WALL), None, "the limit was removed");
    }
}
