//! Whether an event stream that is open is silent although something has happened. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// The event of a container's start arrives within this time; usually within milliseconds.
pub(super) const SILENCE: Duration = Duration::from_secs(10);

/// The events of a stream beside the starts of containers, each of which causes an event.
#[derive(Debug)]
pub(super) struct Silence {
    /// When the stream was requested.
    requested: Instant,
    /// When the last event arrived.
    last_event: Option<Instant>,
    /// When the event of the first start without one is overdue.
    due: Option<Instant>,
    /// It was overdue, and no event has arrived since, also of later streams.
    is_silent: bool,
}

impl Silence {
    /// A stream that was requested then.
    pub(super) fn new(requested: Instant) -> Self {
        Self { requested, last_event: None, due: None, is_silent: false }
    }

    /// The next stream, requested then. It is silent until its first event if this one was.
    pub(super) fn reopened(&mut self, requested: Instant) {
        *self = Self { is_silent: self.is_silent, ..Self::new(requested) };
    }

    pub(super) fn is_silent(&self) -> bool {
        self.is_silent
    }

    /// A container has started; the request was sent at `sent`. Its event may have come before the answer, also in an
    /// earlier stream if the request was sent before this one was requested.
    pub(super) fn started(&mut self, sent: Option<Instant>, now: Instant) {
        let is_missing = |sent: Instant| sent >= self.requested && self.last_event.is_none_or(|event| event < sent);
        if sent.is_some_and(is_missing) {
            self.due = self.due.or(Some(now + SILENCE));
        }
    }

    /// When the stream counts as silent, unless there is an event before.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due.filter(|_| !self.is_silent)
    }

    /// The event is overdue: the stream is silent until the next one.
    pub(super) fn begins(&mut self) {
        self.is_silent = true;
    }

    /// There is an event; true if the stream was silent until now.
    pub(super) fn ends(&mut self, now: Instant) -> bool {
        (self.last_event, self.due) = (Some(now), None);
        std::mem::take(&mut self.is_silent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_without_an_event_is_a_silence() {
        let (begin, second) = (Instant::now(), Duration::from_secs(1));
        let mut silence = Silence::new(begin + second);
        assert_eq!(silence.due(), None);
        silence.started(None, begin);
        assert_eq!(silence.due(), None);
        // The event may have come in an earlier stream.
        silence.started(Some(begin), begin + second * 2);
        assert_eq!(silence.due(), None);
        // The event comes before the answer.
        assert!(!silence.ends(begin + second * 2));
        silence.started(Some(begin + second), begin + second * 2);
        assert_eq!(silence.due(), None);
        // The event comes after it.
        silence.started(Some(begin + second * 3), begin + second * 4);
        assert_eq!(silence.due(), Some(begin + second * 4 + SILENCE));
        assert!(!silence.ends(begin + second * 5));
        assert_eq!(silence.due(), None);
        // There is none, whatever else starts.
        silence.started(Some(begin + second * 6), begin + second * 6);
        silence.started(Some(begin + second * 9), begin + second * 9);
        assert_eq!(silence.due(), Some(begin + second * 6 + SILENCE));
        silence.begins();
        silence.started(Some(begin + second * 20), begin + second * 20);
        assert_eq!(silence.due(), None, "it is known");
        assert!(silence.ends(begin + second * 30));
        assert!(!silence.ends(begin + second * 31));
    }

    #[test]
    fn a_silent_stream_that_is_opened_again_is_silent_until_its_first_event() {
        let (begin, second) = (Instant::now(), Duration::from_secs(1));
        let mut silence = Silence::new(begin);
        silence.started(Some(begin), begin);
        silence.reopened(begin + second);
        assert!(!silence.is_silent() && silence.due().is_none());
        silence.begins();
        silence.reopened(begin + second * 20);
        assert!(silence.is_silent());
        silence.started(Some(begin + second * 21), begin + second * 21);
        assert_eq!(silence.due(), None, "it is known");
        assert!(silence.ends(begin + second * 22));
        silence.reopened(begin + second * 23);
        assert!(!silence.is_silent());
    }
}
