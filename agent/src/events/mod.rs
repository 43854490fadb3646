//! Observed hints: the runtime's event stream and the kernel's records, as one typed, bounded, counted stream.
//!
//! Owns the sensors and their state. A sensor only reports; it knows nothing of pods' specs and decides nothing.
//! Losing one raises the relist rate, and after a gap one relist covers what was missed.
//!
//! ```text
//!  runtime stream ─▶ cri ────┐
//!  ring buffers ──▶ kernel ──┼─▶ Hint ─▶ pleg
//!  pidfd ─────────▶ process ─┘ (pinned by the pleg itself)
//! ```

pub mod cri;
pub mod kernel;
pub mod pidfd;
pub mod process;
pub mod sensors;

use keblet_proto::cri::v1::ContainerStatus;

use crate::model::ContainerId;
use crate::model::KernelMoment;
use crate::model::PodUid;

/// Hints waiting for the PLEG. When full, the senders wait: the runtime has a queue of its own, and what the kernel
/// cannot write meanwhile it counts as lost, which a relist makes good.
pub const HINT_CAPACITY: usize = 4096;

/// What a container should look like once the hint has been served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// Running or beyond.
    Started,
    /// Exited, by the runtime's own word.
    Stopped,
    /// No longer known.
    Deleted,
}

/// One hint. Never state.
#[derive(Clone, Debug)]
pub enum Hint {
    /// The runtime says that something happened to a container or sandbox of a pod.
    Runtime {
        /// The pod, if the event tells.
        uid: PodUid,
        /// The container or sandbox.
        id: ContainerId,
        /// What the PLEG should see when it looks.
        expect: Expect,
        /// For a stop: what the event itself says of the container, if it says that it has exited. An exit is final,
        /// so it may be believed whatever the order in which events arrive.
        exited: Option<Box<ContainerStatus>>,
    },
    /// The kernel recorded the exit of a container's init process.
    Exit(ExitFacts),
    /// The kernel chose a victim.
    Oom(OomFacts),
    /// Something was missed: list everything.
    Gap(RelistReason),
}

/// A container's init process has exited, says the kernel. The process may still hold its files: the pidfd tells when
/// it is gone.
#[derive(Clone, Debug, PartialEq)]
pub struct ExitFacts {
    /// The container, by its cgroup.
    pub container: ContainerId,
    /// Process id in the agent's PID namespace.
    pub pid: u32,
    /// Exit code, 128 + signal for signals.
    pub exit_code: i32,
    /// When.
    pub at: KernelMoment,
}

/// An OOM victim.
#[derive(Clone, Debug, PartialEq)]
pub struct OomFacts {
    /// The victim's container, by its cgroup, if it has one.
    pub container: Option<ContainerId>,
    /// Victim's process id.
    pub pid: u32,
    /// Victim's command name.
    pub comm: String,
    /// Anonymous memory in KiB.
    pub anon_kib: u64,
    /// When.
    pub at: KernelMoment,
}

/// Why all pods are listed.
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
    /// Runtime and kernel disagree.
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
