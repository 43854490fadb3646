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
const MAX_HOLD: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Not tried yet.
    Unknown,
    /// Answers.
    Reachable,
    /// Answers that it does not know us.
    Unauthorized,
    /// Cannot even be asked: there are no credentials.
    NoCredentials,
    /// Does not answer.
    Unreachable,
}

/// What the last request showed.
pub struct Reachability {
    server: String,
    state: Mutex<(State, Instant)>,
    /// The server does not know us.
    unknown: watch::Sender<bool>,
}

impl Reachability {
    /// Nothing is known yet about `server`.
    pub fn new(server: String) -> Self {
        Self { server, state: Mutex::new((State::Unknown, Instant::now())), unknown: watch::Sender::new(false) }
    }

    /// Waits while the server does not know us, but not for ever: somebody has to ask.
    pub async fn wait_until_authenticated(&self) {
        let mut unknown = self.unknown.subscribe();
        // The sender is ours, and running into the limit is an answer too.
        let _ = tokio::time::timeout(MAX_HOLD, unknown.wait_for(|unknown| !unknown)).await;
    }

    /// The state before, and how long it lasted, if `now` is another one. Of many requests at once, those begun before
    /// the last change say nothing of what was after it.
    fn transition(&self, now: State, began: Instant) -> Option<(State, Duration)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0 == now || began < state.1 {
            return None;
        }
        let (before, since) = std::mem::replace(&mut *state, (now, Instant::now()));
        self.unknown.send_replace(matches!(now, State::Unauthorized | State::NoCredentials));
        Some((before, since.elapsed()))
    }

    /// An answer came to a request begun then. `shown` says what credentials the request had.
    pub fn answered(&self, status: StatusCode, began: Instant, shown: impl FnOnce() -> String) {
        let server = &self.server;
        if status == StatusCode::UNAUTHORIZED {
            if self.transition(State::Unauthorized, began).is_some() {
                let shown = shown();
                tracing::error!(
                    server,
                    "the API server refuses our credentials (401 Unauthorized), {shown}; trying on"
                );
            }
            return;
        }
        match self.transition(State::Reachable, began) {
            Some((State::Unknown, _)) => tracing::info!(server, "the API server answers"),
            Some((State::Unauthorized, after)) => {
                tracing::info!(server, ?after, "the API server accepts our credentials again")
            }
            Some((_, after)) => tracing::info!(server, ?after, "the API server answers again"),
            None => {}
        }
    }

    /// Nothing could be sent for want of credentials.
    pub fn no_credentials(&self, error: &CredentialError) {
        if self.transition(State::NoCredentials, Instant::now()).is_some() {
            tracing::error!(server = self.server, "no credentials for the API server: {error}; trying on");
        }
    }

    /// None came to a request begun then.
    pub fn failed(&self, error: &TransportError, began: Instant) {
        // A server closes the connections of whom it refuses; that says nothing new.
        if matches!(error, TransportError::ConnectionReplaced) || *self.unknown.borrow() {
            tracing::debug!(server = self.server, "no answer: {error}");
            return;
        }
        if self.transition(State::Unreachable, began).is_some() {
            tracing::warn!(server = self.server, "the API server does not answer: {error}; trying on");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(reachability: &Reachability) -> State {
        reachability.state.lock().expect("a state").0
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_counts_until_somebody_is_accepted() {
        let reachability = Reachability::new("https://x".to_owned());
        let answered = |status, began| reachability.answered(status, began, String::new);
        let (early, broken) = (Instant::now(), TransportError::Unfinished);
        tokio::time::advance(Duration::from_secs(1)).await;
        answered(StatusCode::UNAUTHORIZED, Instant::now());
        assert_eq!(state(&reachability), State::Unauthorized);
        // Its connections are closed, and an answer to an earlier request comes late.
        tokio::time::advance(Duration::from_secs(1)).await;
        reachability.failed(&broken, Instant::now());
        answered(StatusCode::OK, early);
        assert_eq!(state(&reachability), State::Unauthorized);
        let waiting = tokio::time::timeout(MAX_HOLD / 2, reachability.wait_until_authenticated()).await;
        assert!(waiting.is_err(), "watches wait");
        answered(StatusCode::FORBIDDEN, Instant::now());
        assert_eq!(state(&reachability), State::Reachable, "known, though not allowed");
        let began = Instant::now();
        reachability.wait_until_authenticated().await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(1)).await;
        reachability.failed(&broken, Instant::now());
        assert_eq!(state(&reachability), State::Unreachable);
        reachability.no_credentials(&CredentialError::NoToken("/f".into()));
        reachability.wait_until_authenticated().await;
        assert_eq!(began.elapsed(), Duration::from_secs(1) + MAX_HOLD, "somebody has to ask");
    }
}
