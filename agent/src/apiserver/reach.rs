//! Whether the API server answers and knows us. Said once per change, not once per request.

use std::sync::{Mutex, PoisonError};

use http::StatusCode;
use tokio::time::Instant;

use super::credentials::CredentialError;
use super::transport::TransportError;

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
}

impl Reach {
    /// Nothing is known yet about `server`.
    pub fn new(server: String) -> Self {
        Self { server, state: Mutex::new((State::Unknown, Instant::now())) }
    }

    /// The state before, and how long it lasted, if `now` is another one. Of many requests at once, those begun before
    /// the last change say nothing of what was after it.
    fn enter(&self, now: State, began: Instant) -> Option<(State, std::time::Duration)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0 == now || began < state.1 {
            return None;
        }
        let (before, since) = std::mem::replace(&mut *state, (now, Instant::now()));
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
        if matches!(error, TransportError::Redialled) {
            return;
        }
        if self.enter(State::Away, began).is_some() {
            tracing::warn!(server = self.server, "the API server does not answer: {error}; trying on");
        }
    }
}
