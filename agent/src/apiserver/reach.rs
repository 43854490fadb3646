//! Whether the API server answers and knows us. Said once per change, not once per request.
//!
//! While it does not know us, watches wait here: they would only be refused, ever more rarely ask again, and then long not
//! notice that they could go on. Whoever asks anyway, such as the heartbeat, finds out for all.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http::StatusCode;
use tokio::sync::watch;
use tokio::time::Instant;

use super::credentials::CredentialError;
use super::transport::TransportError;

/// How long a watch waits for others to find out that the server knows us again.
const HELD: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not tried yet.
    Unknown,
    /// Answers.
    Reached,
    /// Answers that it does not know us.
    Refused,
    /// Cannot even be asked: there are no credentials.
    Without,
    /// Does not answer.
    Away,
}

/// What the last request showed.
pub struct Reach {
    server: String,
    state: Mutex<(State, Instant)>,
    /// The server does not know us.
    unknown: watch::Sender<bool>,
}

impl Reach {
    /// Nothing is known yet about `server`.
    pub fn new(server: String) -> Self {
        Self { server, state: Mutex::new((State::Unknown, Instant::now())), unknown: watch::Sender::new(false) }
    }

    /// Waits while the server does not know us, but not for ever: somebody has to ask.
    pub async fn until_known(&self) {
        let mut unknown = self.unknown.subscribe();
        // The sender is ours, and running into the limit is an answer too.
        let _ = tokio::time::timeout(HELD, unknown.wait_for(|unknown| !unknown)).await;
    }

    /// The state before, and how long it lasted, if `now` is another one. Of many requests at once, those begun before
    /// the last change say nothing of what was after it.
    fn enter(&self, now: State, began: Instant) -> Option<(State, Duration)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0 == now || began < state.1 {
            return None;
        }
        let (before, since) = std::mem::replace(&mut *state, (now, Instant::now()));
        self.unknown.send_replace(matches!(now, State::Refused | State::Without));
        Some((before, since.elapsed()))
    }

    /// An answer came to a request begun then. `shown` says what credentials the request had.
    pub fn answered(&self, status: StatusCode, began: Instant, shown: impl FnOnce() -> String) {
        let server = &self.server;
        if status == StatusCode::UNAUTHORIZED {
            if self.enter(State::Refused, began).is_some() {
                let shown = shown();
                tracing::error!(
                    server,
                    "the API server refuses our credentials (401 Unauthorized), {shown}; trying on"
                );
            }
            return;
        }
        match self.enter(State::Reached, began) {
            Some((State::Unknown, _)) => tracing::info!(server, "the API server answers"),
            Some((State::Refused, after)) => {
                tracing::info!(server, ?after, "the API server accepts our credentials again")
            }
            Some((_, after)) => tracing::info!(server, ?after, "the API server answers again"),
            None => {}
        }
    }

    /// Nothing could be sent for want of credentials.
    pub fn without(&self, error: &CredentialError) {
        if self.enter(State::Without, Instant::now()).is_some() {
            tracing::error!(server = self.server, "no credentials for the API server: {error}; trying on");
        }
    }

    /// None came to a request begun then.
    pub fn failed(&self, error: &TransportError, began: Instant) {
        // A server closes the connections of whom it refuses; that says nothing new.
        if matches!(error, TransportError::Redialled) || *self.unknown.borrow() {
            tracing::debug!(server = self.server, "no answer: {error}");
            return;
        }
        if self.enter(State::Away, began).is_some() {
            tracing::warn!(server = self.server, "the API server does not answer: {error}; trying on");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(reach: &Reach) -> State {
        reach.state.lock().expect("a state").0
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_counts_until_somebody_is_accepted() {
        let reach = Reach::new("https://x".to_owned());
        let answered = |status, began| reach.answered(status, began, String::new);
        let (early, broken) = (Instant::now(), TransportError::Unfinished);
        tokio::time::advance(Duration::from_secs(1)).await;
        answered(StatusCode::UNAUTHORIZED, Instant::now());
        assert_eq!(state(&reach), State::Refused);
        // Its connections are closed, and an answer to an earlier request comes late.
        tokio::time::advance(Duration::from_secs(1)).await;
        reach.failed(&broken, Instant::now());
        answered(StatusCode::OK, early);
        assert_eq!(state(&reach), State::Refused);
        let waiting = tokio::time::timeout(HELD / 2, reach.until_known()).await;
        assert!(waiting.is_err(), "watches wait");
        answered(StatusCode::FORBIDDEN, Instant::now());
        assert_eq!(state(&reach), State::Reached, "known, though not allowed");
        let began = Instant::now();
        reach.until_known().await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(1)).await;
        reach.failed(&broken, Instant::now());
        assert_eq!(state(&reach), State::Away);
        reach.without(&CredentialError::NoToken("/f".into()));
        reach.until_known().await;
        assert_eq!(began.elapsed(), Duration::from_secs(1) + HELD, "somebody has to ask");
    }
}
