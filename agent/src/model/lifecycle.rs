//! Pod lifecycle events, from the PLEG to the sync loop. Hints for work, never state.

use std::time::Duration;

use tokio::time::Instant;

use super::ContainerId;
use super::PodRef;

/// The sensor whose hint caused the inspection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The runtime's event stream.
    Runtime,
    /// A BPF probe or a pidfd.
    Kernel,
    /// A relist of all pods.
    Relist,
    /// An inspection that a worker requested after its own action.
    Worker,
}

impl Source {
    /// The label value in logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Runtime => "runtime",
            Self::Kernel => "kernel",
            Self::Relist => "relist",
            Self::Worker => "worker",
        }
    }
}

/// Kinds of pod lifecycle events, as upstream's generic PLEG names them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum LifecycleKind {
    /// A container (or sandbox) runs.
    ContainerStarted,
    /// A container (or sandbox) has exited.
    ContainerDied,
    /// A container (or sandbox) is no longer known to the runtime.
    ContainerRemoved,
    /// The state is now unknown or created. Never delivered to the sync loop.
    ContainerChanged,
}

impl LifecycleKind {
    /// The label value in logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ContainerStarted => "ContainerStarted",
            Self::ContainerDied => "ContainerDied",
            Self::ContainerRemoved => "ContainerRemoved",
            Self::ContainerChanged => "ContainerChanged",
        }
    }
}

/// When something happened according to the kernel, relative to this process' monotonic clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelMoment(
    /// The moment, converted from the kernel's clock on arrival.
    pub Instant,
);

impl KernelMoment {
    /// Time passed since then.
    pub fn age(self, now: Instant) -> Duration {
        now.saturating_duration_since(self.0)
    }
}

/// One pod lifecycle event.
#[derive(Clone, PartialEq, Debug)]
pub struct LifecycleEvent {
    /// The pod.
    pub pod: PodRef,
    /// What happened.
    pub kind: LifecycleKind,
    /// The container or sandbox instance.
    pub container: ContainerId,
    /// The container's name in the spec, empty for sandboxes.
    pub container_name: String,
    /// Exit code for `ContainerDied`, if known.
    pub exit_code: Option<i32>,
    /// The source that reported it first.
    pub source: Source,
    /// When the kernel recorded it, if a probe reported it.
    pub happened: Option<KernelMoment>,
}
