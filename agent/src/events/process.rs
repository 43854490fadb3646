//! Interface to the kernel's processes: watches the init process of a container.

use std::future::Future;
use std::pin::Pin;

use crate::model::ContainerId;

/// Resolves when the process is gone: ended, its files closed, its PID namespace empty if it was its init. Dropping it
/// ends the watch.
pub type GoneFuture = Pin<Box<dyn Future<Output = Gone> + Send>>;

/// A watched process is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gone {
    /// Exit code (128 + signal for signals), where the kernel reports it through the pidfd.
    pub exit_code: Option<i32>,
}

/// Result of watching a process.
pub enum Pinned {
    /// The process exists (or has only just ended), and all processes of the container end with it.
    Watching(GoneFuture),
    /// The process exists, but other processes of the container may outlive it: its end is a hint, not a proof.
    Hint(GoneFuture),
    /// No process with that pid exists, or it is another one: the init is already gone.
    Gone,
    /// No process of the container has that pid. That proves nothing: the init may have ended meanwhile, or the runtime
    /// counts pids in another PID namespace.
    NotFound(String),
    /// The process is not the container's, but the monitor that the runtime runs for it. CRI-O has its pid for that of a
    /// container which was restored from a checkpoint.
    Monitor(String),
    /// It cannot be watched.
    Ineligible(String),
    /// The system refused for a reason that may pass, such as too many open files.
    Failed(String),
}

/// Watches processes. Implemented by the machine's kernel and by simulations.
pub trait ProcessWatch: Send + Sync + 'static {
    /// Watches `pid`, which the runtime reported as the init process of the running container `id`. Checks that the
    /// process is in the container's own cgroup, and whether it is the init of its own PID namespace. Must not block.
    fn pin(&self, pid: u32, id: &ContainerId) -> Pinned;
}

/// Watches nothing: the pidfd sensor is off.
pub struct NoProcessWatch;

impl ProcessWatch for NoProcessWatch {
    fn pin(&self, _pid: u32, _id: &ContainerId) -> Pinned {
        Pinned::Ineligible("pidfd sensor is off".to_owned())
    }
}
