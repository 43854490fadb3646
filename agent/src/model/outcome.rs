//! Results of starts.

use std::fmt;
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
    /// When the pod is synced again for this, if that has a time of its own: a back-off ends, or is to be shown.
    pub retry_at: Option<SystemTime>,
}

impl StartFailure {
    /// Token of a start that waits for the next pull of its image, after one that failed.
    pub const IMAGE_PULL_BACK_OFF: &str = "ImagePullBackOff";
}

impl fmt::Display for StartFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.token, self.message)
    }
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
