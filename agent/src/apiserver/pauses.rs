//! The pauses of a watch after errors in a row: a [`Backoff`] with a rule of its own for when the row ends, since a watch of
//! many objects may fail just after it has served something. Requests for single objects have other rules
//! (`agent/src/objects/retry.rs`): they succeed as a whole, and a 403 is expected at first.

use std::time::Duration;

use tokio::time::Instant;

use crate::model::Backoff;

/// First pause after an error, without jitter.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(800);
/// Longest pause after an error, without jitter.
pub(crate) const LAST_PAUSE: Duration = Duration::from_secs(30);
/// After this long without an error pauses start short again, if there was progress.
pub(super) const QUIET: Duration = Duration::from_secs(10);

/// The pauses after errors in a row. Time without an error does not end the row alone, as a server may be slow to fail; nor
/// does progress, as every list may succeed and every watch fail.
#[derive(Debug)]
pub(super) struct Pauses {
    backoff: Backoff,
    /// When the last pause ended.
    over: Option<Instant>,
    /// The server has served something since the last error.
    progress: bool,
    /// The last pause was ended by the server's recovery.
    recovered: bool,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { backoff: Backoff::new(FIRST_PAUSE, LAST_PAUSE), over: None, progress: false, recovered: false }
    }
}

impl Pauses {
    /// The server has completed a list, or serves the watch.
    pub(super) fn progress(&mut self) {
        self.progress = true;
    }

    /// The pause from `now` on; `random` is in [0, 1).
    pub(super) fn next(&mut self, now: Instant, random: f64) -> Duration {
        let is_quiet = self.over.is_some_and(|over| now.saturating_duration_since(over) >= QUIET);
        if std::mem::take(&mut self.progress) && is_quiet {
            self.backoff.succeeded();
        }
        self.recovered = false;
        self.backoff.failed(random)
    }

    /// The pause before a new list, since the known resource version cannot be resumed. After a recovery that is no further
    /// failure: a server that has restarted does not know the earlier ones. But it is if it happens again.
    pub(super) fn before_list(&mut self, now: Instant, random: f64) -> Duration {
        if std::mem::take(&mut self.recovered) { FIRST_PAUSE.mul_f64(1.0 + random) } else { self.next(now, random) }
    }

    /// The pause has ended; `recovered`: because the server is available again.
    pub(super) fn over(&mut self, now: Instant, recovered: bool) {
        (self.over, self.recovered) = (Some(now), recovered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_start_anew_after_progress_and_ten_quiet_seconds() {
        let (mut pauses, mut now) = (Pauses::default(), Instant::now());
        let mut seconds = Vec::new();
        for failure in 0..8 {
            let pause = pauses.next(now, 0.0);
            seconds.push(pause.as_secs_f64());
            now += pause;
            pauses.over(now, false);
            // Either alone.
            if failure % 2 == 0 {
                pauses.progress();
                now += Duration::from_secs(9);
            } else {
                now += QUIET * 6;
            }
        }
        assert_eq!(seconds, [0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]);
        assert_eq!(pauses.next(now, 0.5), Duration::from_secs(45), "jitter adds");
        now += Duration::from_secs(45);
        pauses.over(now, false);
        pauses.progress();
        assert_eq!(pauses.next(now + QUIET, 0.0), FIRST_PAUSE);
    }

    #[test]
    fn a_list_that_a_recovery_makes_necessary_follows_soon_once() {
        let (mut pauses, now) = (Pauses::default(), Instant::now());
        for _ in 0..8 {
            pauses.next(now, 0.0);
        }
        pauses.over(now, true);
        assert_eq!(pauses.before_list(now, 0.5), FIRST_PAUSE.mul_f64(1.5));
        pauses.over(now, false);
        assert_eq!(pauses.before_list(now, 0.0), LAST_PAUSE, "again, without a recovery");
        pauses.over(now, true);
        assert_eq!(pauses.next(now, 0.0), LAST_PAUSE, "another failure");
        assert_eq!(pauses.before_list(now, 0.0), LAST_PAUSE, "the recovery was before that");
    }
}
