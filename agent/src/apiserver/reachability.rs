//! Whether the API server is reachable and accepts our credentials. Logged once per change, not once per request.
//!
//! While it answers 401, watches wait here: they would fail with growing pauses and resume late. Other requests, such
//! as heartbeats, detect that credentials are accepted again.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use http::StatusCode;
use tokio::sync::watch;
use tokio::time::Instant;

use super::credentials::CredentialError;
use super::transport::TransportError;

/// How long a watch waits for other requests to be accepted. Shorter than `WATCH_SILENCE`, which includes it: a server that
/// was sent nothing is not silent.
const MAX_HOLD: Duration = Duration::from_secs(15);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No request was sent yet.
    Unknown,
    /// It answers.
    Reachable,
    /// It answers 401 Unauthorized.
    Unauthorized,
    /// No request can be sent for lack of credentials.
    NoCredentials,
    /// It does not answer.
    Unreachable,
}

/// The outcome of the last request.
pub(super) struct Reachability {
    server: String,
    state: Mutex<(State, Instant)>,
    /// Requests are not authenticated.
    unauthenticated: watch::Sender<bool>,
}

impl Reachability {
    /// No request was sent to `server` yet.
    pub(super) fn new(server: String) -> Self {
        Self { server, state: Mutex::new((State::Unknown, Instant::now())), unauthenticated: watch::Sender::new(false) }
    }

    /// Waits while requests are not authenticated, for [`MAX_HOLD`] at most.
    pub(super) async fn wait_until_authenticated(&self) {
        let mut unauthenticated = self.unauthenticated.subscribe();
        // The sender lives as long as `self`; after the timeout the caller tries itself.
        let _ = tokio::time::timeout(MAX_HOLD, unauthenticated.wait_for(|unauthenticated| !unauthenticated)).await;
    }

    /// The previous state and its duration, if `now` is another one. Ignores requests that began before the last
    /// change.
    fn transition(&self, now: State, began: Instant) -> Option<(State, Duration)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0 == now || began < state.1 {
            return None;
        }
        let (before, since) = std::mem::replace(&mut *state, (now, Instant::now()));
        self.unauthenticated.send_replace(matches!(now, State::Unauthorized | State::NoCredentials));
        Some((before, since.elapsed()))
    }

    /// A request that began then was answered. `credentials` describes what it carried.
    pub(super) fn answered(&self, status: StatusCode, began: Instant, credentials: impl FnOnce() -> String) {
        let server = &self.server;
        if status == StatusCode::UNAUTHORIZED {
            if self.transition(State::Unauthorized, began).is_some() {
                let credentials = credentials();
                tracing::error!(
                    server,
                    "the API server rejects our credentials (401 Unauthorized), {credentials}; trying again"
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

    /// A request could not be sent for lack of credentials.
    pub(super) fn no_credentials(&self, error: &CredentialError) {
        if self.transition(State::NoCredentials, Instant::now()).is_some() {
            tracing::error!(server = self.server, "no credentials for the API server: {error}; trying again");
        }
    }

    /// A request that began then got no answer.
    pub(super) fn failed(&self, error: &TransportError, began: Instant) {
        // A server that answers 401 closes the connection too; that is no change.
        if matches!(error, TransportError::ConnectionReplaced) || *self.unauthenticated.borrow() {
            tracing::debug!(server = self.server, "no answer: {error}");
            return;
        }
        if self.transition(State::Unreachable, began).is_some() {
            tracing::warn!(server = self.server, "the API server does not answer: {error}; trying again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::watch_errors::WATCH_SILENCE;
    use crate::apiserver::watch_errors::in_time;

    fn state(reachability: &Reachability) -> State {
        reachability.state.lock().expect("a state").0
    }

    #[tokio::test(start_paused = true)]
    async fn a_401_counts_until_a_request_is_authenticated() {
        let reachability = Reachability::new("https://x".to_owned());
        let answered = |status, began| reachability.answered(status, began, String::new);
        let (early, broken) = (Instant::now(), TransportError::Unfinished);
        tokio::time::advance(Duration::from_secs(1)).await;
        answered(StatusCode::UNAUTHORIZED, Instant::now());
        assert_eq!(state(&reachability), State::Unauthorized);
        // Connections are closed, and the answer to an earlier request arrives late.
        tokio::time::advance(Duration::from_secs(1)).await;
        reachability.failed(&broken, Instant::now());
        answered(StatusCode::OK, early);
        assert_eq!(state(&reachability), State::Unauthorized);
        let waiting = tokio::time::timeout(MAX_HOLD / 2, reachability.wait_until_authenticated()).await;
        assert!(waiting.is_err(), "watches wait");
        answered(StatusCode::FORBIDDEN, Instant::now());
        assert_eq!(state(&reachability), State::Reachable, "authenticated, though not authorized");
        let began = Instant::now();
        reachability.wait_until_authenticated().await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(1)).await;
        reachability.failed(&broken, Instant::now());
        assert_eq!(state(&reachability), State::Unreachable);
        reachability.no_credentials(&CredentialError::NoToken("/f".into()));
        reachability.wait_until_authenticated().await;
        assert_eq!(began.elapsed(), Duration::from_secs(1) + MAX_HOLD, "then the watch tries itself");
    }

    /// It would be replaced by a list, which is not held.
    #[tokio::test(start_paused = true)]
    async fn a_watch_that_was_held_has_time_to_be_answered() {
        let reachability = Reachability::new("https://x".to_owned());
        tokio::time::advance(Duration::from_secs(1)).await;
        reachability.answered(StatusCode::UNAUTHORIZED, Instant::now(), String::new);
        let request = async {
            reachability.wait_until_authenticated().await;
            tokio::time::sleep(Duration::from_secs(10)).await;
            Ok(())
        };
        let answer = in_time(WATCH_SILENCE, http::Request::default(), |_| request).await;
        assert!(answer.is_ok(), "{answer:?}");
    }
}
