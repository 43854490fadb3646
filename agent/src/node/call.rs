//! Calls to the API server: each with a deadline, failures told apart, pauses between tries.

use std::sync::Arc;
use std::time::Duration;

use super::config::NodeConfig;

/// Called when heartbeats fail repeatedly without an answer: the connection may be dead and not know it.
pub type OnHeartbeatFailure = Arc<dyn Fn() + Send + Sync>;

/// A call that did not succeed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The API server refused, or was not reached.
    #[error(transparent)]
    Api(#[from] kube::Error),
    /// It did not answer.
    #[error("the API server did not answer within {0:?}")]
    Timeout(Duration),
}

impl CallError {
    fn code(&self) -> Option<u16> {
        match self {
            Self::Api(kube::Error::Api(status)) => Some(status.code),
            _ => None,
        }
    }

    /// The API server may not even have heard of it.
    pub(super) fn is_unanswered(&self) -> bool {
        self.code().is_none()
    }

    pub(super) fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// The object exists already, or was written by somebody else meanwhile.
    pub(super) fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    pub(super) fn is_forbidden(&self) -> bool {
        self.code() == Some(403)
    }
}

/// Says that a call failed, in one line. That the API server is away or does not know us is said by whoever speaks to it,
/// once.
pub(super) fn log_failure(node: &str, what: &'static str, error: &CallError) {
    if error.is_unanswered() || error.code() == Some(401) {
        tracing::debug!(node, %error, "{what}");
    } else {
        tracing::warn!(node, %error, "{what}");
    }
}

/// Waits for a call, at most this long.
pub(super) async fn within<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(timeout, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(CallError::Timeout(timeout)),
    }
}

/// A heartbeat that takes longer is overtaken by the next one.
pub(super) fn heartbeat_timeout(config: &NodeConfig) -> Duration {
    let lease = Duration::from_secs(u64::try_from(config.lease_seconds).unwrap_or(40));
    config.update_period.min(lease)
}

/// Pauses that double up to seven seconds.
#[derive(Debug)]
pub(super) struct Pauses {
    next: Duration,
}

impl Pauses {
    const LONGEST: Duration = Duration::from_secs(7);

    pub(super) fn new(first: Duration) -> Self {
        Self { next: first }
    }

    pub(super) async fn wait(&mut self) {
        tokio::time::sleep(self.next).await;
        self.next = (self.next * 2).min(Self::LONGEST);
    }
}
