//! Sensors and their hints: the runtime's event stream and the kernel's records, as one typed and bounded stream. A sensor
//! only reports. Losing one raises the relist rate; after a gap one relist covers what was missed.
//!
//! ```text
//!  runtime stream ─▶ cri ────┐
//!  ring buffers ──▶ kernel ──┼─▶ Hint ─▶ pleg
//!  pidfd ─────────▶ process ─┘ (watched by the pleg itself)
//! ```

pub mod cri;
pub mod kernel;
mod oom;
pub mod oom_fallback;
pub mod pidfd;
pub mod pods_memory;
pub mod pressure;
pub mod process;
mod readings;
pub mod sensors;
mod silence;

use keblet_proto::cri::v1::ContainerStatus;

use crate::model::ContainerId;
use crate::model::KernelMoment;
use crate::model::OomRecord;
use crate::model::PodUid;

/// Hints queued for the PLEG. When full, the senders wait: the runtime has a queue of its own, and records that the kernel
/// drops meanwhile are counted and covered by a relist.
pub const HINT_CAPACITY: usize = 4096;

/// The state that a hint announces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// Running or beyond.
    Started,
    /// Exited, as reported by the runtime.
    Stopped,
    /// Removed.
    Deleted,
}

/// One hint. Never state.
#[derive(Clone, Debug)]
pub enum Hint {
    /// The runtime reported an event of a container or sandbox.
    Runtime {
        /// The pod.
        uid: PodUid,
        /// The container or sandbox.
        id: ContainerId,
        /// What an inspection should show.
        expect: Expect,
        /// For a stop: the status of the container in the event, if it has exited. An exit is final, whatever the order of
        /// events.
        exited: Option<Box<ContainerStatus>>,
    },
    /// The kernel recorded the exit of a container's init process.
    Exit(ExitFacts),
    /// The OOM killer chose a process.
    Oom(Box<OomRecord>),
    /// Events were missed: a relist is needed.
    Gap(RelistReason),
}

/// A container's init process exited. It may still hold its files: a pidfd becomes readable when it is gone.
#[derive(Clone, Debug, PartialEq)]
pub struct ExitFacts {
    /// The container, by its cgroup.
    pub container: ContainerId,
    /// Process id in the agent's PID namespace.
    pub pid: u32,
    /// Exit code, 128 + signal for signals.
    pub exit_code: i32,
    /// A signal ended it.
    pub signalled: bool,
    /// The OOM killer had chosen it.
    pub oom_victim: bool,
    /// When the process exited.
    pub at: KernelMoment,
}

/// Reason of a relist.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum RelistReason {
    /// The agent starts.
    Start,
    /// The period is over.
    Period,
    /// The event stream is (again) up.
    Reconnect,
    /// Records were dropped.
    Dropped,
    /// An event named no pod.
    Unattributed,
    /// Events arrived that are older than the subscription.
    Backlog,
    /// The runtime did not confirm an exit that the kernel proved.
    Contradiction,
}

impl RelistReason {
    /// The label value in logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Period => "period",
            Self::Reconnect => "reconnect",
            Self::Dropped => "dropped",
            Self::Unattributed => "unattributed",
            Self::Backlog => "backlog",
            Self::Contradiction => "contradiction",
        }
    }
}
