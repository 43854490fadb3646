//! When events that reach nobody are worth a line in the log. Pure: the time is an argument.
//!
//! A server that refuses one event refuses the next one too. So an episode, events lost one after the other for the same
//! cause, has one line when it begins, and one with the number of all others when it is over; and however episodes come
//! and go, there is no more than one line in [`PAUSE`].

use std::time::Duration;

use tokio::time::Instant;

/// Time between two lines.
const PAUSE: Duration = Duration::from_secs(60);

/// Counts what is not told.
#[derive(Debug, Default)]
pub(super) struct Silence {
    episode: Option<Episode>,
    /// Lost events that no line has told of.
    untold: u64,
    last_line: Option<Instant>,
}

#[derive(Debug)]
struct Episode {
    cause: String,
    told: bool,
}

/// A line is due.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Line {
    /// Lost events of which nothing was said so far.
    pub(super) untold: u64,
}

impl Silence {
    /// An event was lost: whether this one is told, and how many others with it.
    pub(super) fn lost(&mut self, cause: &str, now: Instant) -> Option<Line> {
        if self.episode.as_ref().is_none_or(|episode| episode.cause != cause) {
            self.episode = Some(Episode { cause: cause.to_owned(), told: false });
        }
        let is_paused = self.is_paused(now);
        match &mut self.episode {
            Some(episode) if !episode.told && !is_paused => {
                episode.told = true;
                self.last_line = Some(now);
                Some(Line { untold: std::mem::take(&mut self.untold) })
            }
            _ => {
                self.untold = self.untold.saturating_add(1);
                None
            }
        }
    }

    /// An event was delivered: whether it is told how many were not.
    pub(super) fn delivered(&mut self, now: Instant) -> Option<Line> {
        self.episode = None;
        if self.untold == 0 || self.is_paused(now) {
            return None;
        }
        self.last_line = Some(now);
        self.rest()
    }

    /// The end: whether there is something left to tell.
    pub(super) fn rest(&mut self) -> Option<Line> {
        let untold = std::mem::take(&mut self.untold);
        (untold > 0).then_some(Line { untold })
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.last_line.is_some_and(|at| now.saturating_duration_since(at) < PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn untold(line: Option<Line>) -> Option<u64> {
        line.map(|line| line.untold)
    }

    #[tokio::test(start_paused = true)]
    async fn an_episode_has_two_lines_however_long_it_is() {
        let (mut silence, start) = (Silence::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(untold(silence.lost("401", start)), Some(0), "the first is told at once");
        let lines = (1..=5000).filter_map(|second| silence.lost("401", at(second))).count();
        assert_eq!(lines, 0);
        assert_eq!(untold(silence.delivered(at(5001))), Some(5000));
        assert_eq!(silence.delivered(at(6000)), None);
        assert_eq!(untold(silence.lost("401", at(6000))), Some(0), "another episode");
        assert_eq!((silence.rest(), silence.delivered(at(7000))), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn lines_are_a_minute_apart_however_episodes_come() {
        let (mut silence, start) = (Silence::default(), Instant::now());
        let (mut lines, mut told) = (0, 0);
        for second in 0..600 {
            let now = start + Duration::from_secs(second);
            let cause = if second % 2 == 0 { "403" } else { "500" };
            let here = [silence.lost(cause, now).map(|line| line.untold + 1), untold(silence.delivered(now))];
            lines += here.iter().flatten().count();
            told += here.into_iter().flatten().sum::<u64>();
        }
        assert_eq!(lines, 10);
        assert_eq!(told + untold(silence.rest()).unwrap_or(0), 600, "none is forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn an_episode_that_began_in_a_pause_is_told_after_it() {
        let (mut silence, start) = (Silence::default(), Instant::now());
        assert!(silence.lost("401", start).is_some());
        assert!(silence.lost("403", start + Duration::from_secs(1)).is_none());
        assert_eq!(untold(silence.lost("403", start + PAUSE)), Some(1));
    }
}
