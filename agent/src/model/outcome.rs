//! What came of executing a plan.

use std::time::SystemTime;

use super::ContainerClass;
use super::ContainerId;

/// Why a container was not started. `token` becomes the waiting reason (`CrashLoopBackOff`, `ErrImagePull`,
/// `CreateContainerError`, ...), `message` the waiting message.
#[derive(Clone, Debug, PartialEq)]
pub struct StartFailure {
    /// Upstream's error token.
    pub token: String,
    /// Human-readable detail.
    pub message: String,
    /// When a retry makes sense (crash-loop back-off only).
    pub retry_at: Option<SystemTime>,
}

/// Result of one planned start.
#[derive(Clone, Debug, PartialEq)]
pub struct StartOutcome {
    /// Container name.
    pub name: String,
    /// Which list of the spec it is in.
    pub class: ContainerClass,
    /// The new instance, or why there is none.
    pub result: Result<ContainerId, StartFailure>,
}

/// Result of executing one plan.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct SyncOutcome {
    /// The creation of a sandbox was tried, and whether it succeeded.
    pub sandbox: Option<bool>,
    /// One entry per planned start that was tried.
    pub starts: Vec<StartOutcome>,
    /// Everything else that failed (kills, sandbox, removals), as upstream's sync results word it.
    pub errors: Vec<String>,
    /// The pod's network is not ready yet: retry soon.
    pub network_not_ready: bool,
    /// Nothing was started because volumes are not there.
    pub volumes_not_ready: bool,
    /// RestartAllContainers removals were done: sync again at once.
    pub restart_all_done: bool,
}

impl SyncOutcome {
    /// True if nothing failed.
    pub fn is_ok(&self) -> bool {
        self.errors.is_empty() && self.starts.iter().all(|s| s.result.is_ok())
    }
}
