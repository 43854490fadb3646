//! The seam to the kernel's processes: pinning a container's init so that its death can be proven.

use std::future::Future;
use std::pin::Pin;

use crate::model::ContainerId;

/// Resolves when the pinned process is gone: no longer running, its files closed, its PID namespace empty. Dropping
/// it unpins.
pub type GoneFuture = Pin<Box<dyn Future<Output = Gone> + Send>>;

/// A pinned process is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gone {
    /// Exit code (128 + signal for signals), where the kernel tells through the pidfd.
    pub exit_code: Option<i32>,
}

/// What came of pinning.
pub enum Pinned {
    /// The process lives (or has only just died): wait for it.
    Watching(GoneFuture),
    /// No process with that pid exists, or it is another one: the init is already gone.
    Gone,
    /// It cannot be pinned, or its death would prove nothing.
    Ineligible(String),
}

/// Pins processes. Implemented by the machine's kernel and by simulations.
pub trait ProcessWatch: Send + Sync + 'static {
    /// Pins `pid`, which the runtime names as the init process of the running container `id`. Checks after pinning
    /// that the process lies in the container's own cgroup and leads its own PID namespace. Must not block.
    fn pin(&self, pid: u32, id: &ContainerId) -> Pinned;
}

/// For agents without kernel sensors.
pub struct NoProcessWatch;

impl ProcessWatch for NoProcessWatch {
    fn pin(&self, _pid: u32, _id: &ContainerId) -> Pinned {
        Pinned::Ineligible("pidfd sensor is off".to_owned())
    }
}
