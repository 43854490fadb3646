//! Rate limit of the log lines about events that were not delivered. Pure: the time is an argument.
//!
//! A server that refuses one event refuses the next one too. So an episode, events lost one after the other for the same
//! cause, has one line when it begins, and one with the number of all others when it is over. There is at most one line
//! in [`PAUSE`].

use std::time::Duration;

use tokio::time::Instant;

/// Time between two lines.
const PAUSE: Duration = Duration::from_secs(60);

/// Counts lost events that are not logged.
#[derive(Debug, Default)]
pub(super) struct LogRateLimit {
    episode: Option<Episode>,
    /// Lost events that are in no line yet.
    unlogged: u64,
    last_line: Option<Instant>,
}

#[derive(Debug)]
struct Episode {
    cause: String,
    logged: bool,
}

/// A line is due.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Line {
    /// Lost events since the last line.
    pub(super) unlogged: u64,
}

impl LogRateLimit {
    /// An event was lost. Returns the line to write, if one is due.
    pub(super) fn lost(&mut self, cause: &str, now: Instant) -> Option<Line> {
        if self.episode.as_ref().is_none_or(|episode| episode.cause != cause) {
            self.episode = Some(Episode { cause: cause.to_owned(), logged: false });
        }
        let is_paused = self.is_paused(now);
        match &mut self.episode {
            Some(episode) if !episode.logged && !is_paused => {
                episode.logged = true;
                self.last_line = Some(now);
                Some(Line { unlogged: std::mem::take(&mut self.unlogged) })
            }
            _ => {
                self.unlogged = self.unlogged.saturating_add(1);
                None
            }
        }
    }

    /// An event was delivered. Returns the line to write if events were lost before it and a line is due.
    pub(super) fn delivered(&mut self, now: Instant) -> Option<Line> {
        self.episode = None;
        if self.unlogged == 0 || self.is_paused(now) {
            return None;
        }
        self.last_line = Some(now);
        self.rest()
    }

    /// The agent stops: returns the last line to write.
    pub(super) fn rest(&mut self) -> Option<Line> {
        let unlogged = std::mem::take(&mut self.unlogged);
        (unlogged > 0).then_some(Line { unlogged })
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.last_line.is_some_and(|at| now.saturating_duration_since(at) < PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unlogged(line: Option<Line>) -> Option<u64> {
        line.map(|line| line.unlogged)
    }

    #[tokio::test(start_paused = true)]
    async fn an_episode_has_two_lines_however_long_it_is() {
        let (mut limit, start) = (LogRateLimit::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(unlogged(limit.lost("401", start)), Some(0), "the first is logged at once");
        let lines = (1..=5000).filter_map(|second| limit.lost("401", at(second))).count();
        assert_eq!(lines, 0);
        assert_eq!(unlogged(limit.delivered(at(5001))), Some(5000));
        assert_eq!(limit.delivered(at(6000)), None);
        assert_eq!(unlogged(limit.lost("401", at(6000))), Some(0), "another episode");
        assert_eq!((limit.rest(), limit.delivered(at(7000))), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn lines_are_a_minute_apart_however_episodes_come() {
        let (mut limit, start) = (LogRateLimit::default(), Instant::now());
        let (mut lines, mut logged) = (0, 0);
        for second in 0..600 {
            let now = start + Duration::from_secs(second);
            let cause = if second % 2 == 0 { "403" } else { "500" };
            let here = [limit.lost(cause, now).map(|line| line.unlogged + 1), unlogged(limit.delivered(now))];
            lines += here.iter().flatten().count();
            logged += here.into_iter().flatten().sum::<u64>();
        }
        assert_eq!(lines, 10);
        assert_eq!(logged + unlogged(limit.rest()).unwrap_or(0), 600, "every event is counted");
    }

    #[tokio::test(start_paused = true)]
    async fn an_episode_that_began_in_a_pause_is_logged_after_it() {
        let (mut limit, start) = (LogRateLimit::default(), Instant::now());
        assert!(limit.lost("401", start).is_some());
        assert!(limit.lost("403", start + Duration::from_secs(1)).is_none());
        assert_eq!(unlogged(limit.lost("403", start + PAUSE)), Some(1));
    }
}
