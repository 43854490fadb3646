//! What executing a plan led to.

use std::time::SystemTime;

use super::PodError;
use crate::model::StartFailure;
use crate::model::StartOutcome;
use crate::volumes::FailedVolume;

/// Result of executing one plan.
#[derive(Debug, Default)]
pub struct SyncOutcome {
    /// The creation of a sandbox was tried, and whether it succeeded. One that failed for a terminated pod counts as
    /// succeeded.
    pub sandbox: Option<bool>,
    /// Resources were to be changed in place, and whether they were.
    pub resized: Option<bool>,
    /// One entry per planned start that was tried.
    pub starts: Vec<StartOutcome>,
    /// Everything else that failed (prerequisites, kills, sandbox, removals).
    pub errors: Vec<PodError>,
    /// RestartAllContainers removals were done: sync again at once.
    pub restart_all_done: bool,
}

impl SyncOutcome {
    /// True if nothing failed.
    pub fn is_ok(&self) -> bool {
        self.errors.is_empty() && self.starts.iter().all(|s| s.result.is_ok())
    }

    /// All that failed are starts that wait for the next pull of their image: nothing was tried.
    pub fn is_held_back(&self) -> bool {
        let mut failures = self.failed_starts().peekable();
        let is_alone = self.errors.is_empty() && failures.peek().is_some();
        is_alone && failures.all(|failure| failure.token == StartFailure::IMAGE_PULL_BACK_OFF)
    }

    /// When the pod is synced again for a start that failed, if one has a time of its own.
    pub fn retry_at(&self) -> Option<SystemTime> {
        self.failed_starts().filter_map(|failure| failure.retry_at).min()
    }

    fn failed_starts(&self) -> impl Iterator<Item = &StartFailure> {
        self.starts.iter().filter_map(|start| start.result.as_ref().err())
    }

    /// Why resources could not be changed in place.
    pub fn resize_error(&self) -> Option<String> {
        let resize = self.errors.iter().find(|error| matches!(error, PodError::Resize { .. }));
        resize.map(|error| error.render().message)
    }

    /// Nothing was started because the runtime's network is not ready: retry soon.
    pub fn network_not_ready(&self) -> bool {
        self.errors.iter().any(|error| matches!(error, PodError::NetworkNotReady { .. }))
    }

    /// Nothing was started because volumes are not set up.
    pub fn volumes_not_ready(&self) -> bool {
        self.errors.iter().any(|error| matches!(error, PodError::SetUpVolumes { .. }))
    }

    /// One of these volumes has a claim that cannot be used yet.
    pub fn claims_not_ready(&self) -> bool {
        self.errors.iter().any(|error| match error {
            PodError::SetUpVolumes { failed } => failed.iter().any(FailedVolume::is_unprocessed),
            _ => false,
        })
    }
}
