//! Calls to the API server: deadlines, error classes, log lines.

use std::time::Duration;

use super::config::NodeConfig;
use crate::apiserver::ApiServer;
use crate::model::LoggedReasons;

/// The connections to the API server.
pub trait Connections: Send + Sync {
    /// Heartbeats failed repeatedly without a response, so that the connection may be broken: further requests get another
    /// one (`OnHeartbeatFailure` of the kubelet).
    fn retire(&self);
}

impl Connections for ApiServer {
    fn retire(&self) {
        self.retire_connections();
    }
}

/// A call that did not succeed.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The API server returned an error, or was not reached.
    #[error(transparent)]
    Api(#[from] kube::Error),
    /// It did not respond in time.
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

    /// There was no response.
    pub(super) fn is_unanswered(&self) -> bool {
        self.code().is_none() && !self.is_undecodable()
    }

    /// It was executed, and what the API server answered cannot be decoded.
    pub(super) fn is_undecodable(&self) -> bool {
        matches!(self, Self::Api(kube::Error::SerdeError(error)) if error.is_data())
    }

    pub(super) fn is_not_found(&self) -> bool {
        self.code() == Some(404)
    }

    /// The object exists already, or was changed meanwhile.
    pub(super) fn is_conflict(&self) -> bool {
        self.code() == Some(409)
    }

    pub(super) fn is_forbidden(&self) -> bool {
        self.code() == Some(403)
    }
}

/// Longest pause between attempts of what is repeated until it succeeds.
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(7);

/// Logs failed calls: of each purpose once for every change of the error, as one that is forbidden is repeated at every
/// heartbeat. That the API server is unreachable or rejects the credentials is logged once by the API client.
#[derive(Debug, Default)]
pub(super) struct FailureLog(LoggedReasons);

impl FailureLog {
    /// A call failed; `what` names its purpose.
    pub(super) fn failed(&mut self, node: &str, what: &'static str, error: &CallError) {
        if self.is_new(what, error) {
            tracing::warn!(node, %error, "{what}");
        } else {
            tracing::debug!(node, %error, "{what}");
        }
    }

    fn is_new(&mut self, what: &'static str, error: &CallError) -> bool {
        if matches!(error.code(), None | Some(401)) {
            return false;
        }
        self.0.is_new(what, &error.to_string())
    }

    /// A call with this purpose succeeded: its next failure is logged.
    pub(super) fn succeeded(&mut self, what: &'static str) {
        self.0.succeeded(what);
    }
}

/// Runs a call with a deadline.
pub(super) async fn within<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, CallError> {
    match tokio::time::timeout(timeout, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(CallError::Timeout(timeout)),
    }
}

/// Deadline of a heartbeat: the time of the next one.
pub(super) fn heartbeat_timeout(config: &NodeConfig) -> Duration {
    let lease = Duration::from_secs(u64::try_from(config.lease_seconds).unwrap_or(40));
    config.update_period.min(lease)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u16, message: &str) -> CallError {
        let status = serde_json::json!({"status": "Failure", "message": message, "reason": "x", "code": code});
        CallError::Api(kube::Error::Api(serde_json::from_value(status).expect("a status")))
    }

    #[test]
    fn each_change_of_an_error_is_logged_once() {
        let mut log = FailureLog::default();
        let table = [
            ("renew", error(403, "not allowed"), true),
            ("renew", error(403, "not allowed"), false),
            ("create", error(403, "not allowed"), true),
            ("renew", error(401, "unauthorized"), false),
            ("renew", CallError::Timeout(Duration::from_secs(1)), false),
            ("renew", error(403, "not allowed"), false),
            ("renew", error(500, "broken"), true),
            ("renew", error(403, "not allowed"), true),
        ];
        for (what, error, expected) in table {
            assert_eq!(log.is_new(what, &error), expected, "{what}: {error}");
        }
        log.succeeded("renew");
        assert!(log.is_new("renew", &error(403, "not allowed")), "again after a success");
        assert!(!log.is_new("create", &error(403, "not allowed")));
    }
}
