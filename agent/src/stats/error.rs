//! Why usage is not available.

/// Usage is not available. The texts begin as those of upstream do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StatsError {
    /// The file system of the agent's root directory.
    #[error("failed to get rootFs stats: {0}")]
    RootFs(String),
    /// The runtime's file system.
    #[error("failed to get imageFs stats: {0}")]
    ImageFs(String),
    /// Pods and containers.
    #[error("failed to list pod stats: {0}")]
    Pods(String),
    /// The agent is shutting down.
    #[error("cannot measure usage: {0}")]
    Stopped(String),
    /// The summary cannot be encoded.
    #[error("cannot encode the summary: {0}")]
    Encode(String),
}
