//! Evidence of one OOM kill, as one source reports it: a probe's record, a cgroup's counter, or the kernel log.

use super::ContainerId;
use super::KernelMoment;
use super::OomConfidence;
use super::OomMemory;
use super::PodUid;

/// What one source reports of one OOM kill. `None` where the source does not know.
#[derive(Clone, Debug, PartialEq)]
pub struct OomRecord {
    /// The source.
    pub source: OomConfidence,
    /// When the process was chosen; when the kill was noticed unless `is_timed`.
    pub moment: KernelMoment,
    /// `moment` is the kernel's own.
    pub is_timed: bool,
    /// Process id in the host's PID namespace.
    pub pid: Option<u32>,
    /// Command name; empty if unknown.
    pub comm: String,
    /// The process's cgroup in the hierarchy that identifies containers.
    pub place: Option<CgroupPlace>,
    /// The exceeded limit.
    pub limit: OomLimit,
    /// Memory of the process.
    pub memory: Option<OomMemory>,
    /// The uppermost process above the victim in its container.
    pub root: Option<OomRoot>,
    /// The process is in the host's PID namespace.
    pub host_pid_namespace: bool,
    /// Id of the cgroup that is killed as a whole.
    pub group: Option<u64>,
}

impl OomRecord {
    /// A record of which only source and time are known.
    pub fn new(source: OomConfidence, moment: KernelMoment) -> Self {
        Self {
            source,
            moment,
            is_timed: true,
            pid: None,
            comm: String::new(),
            place: None,
            limit: OomLimit::Unknown,
            memory: None,
            root: None,
            host_pid_namespace: false,
            group: None,
        }
    }

    /// The container or sandbox whose cgroup, or a cgroup below it, the process is in.
    pub fn container(&self) -> Option<&ContainerId> {
        self.place.as_ref().and_then(|place| place.container.as_ref())
    }

    /// The pod whose cgroup is above that of the process.
    pub fn pod(&self) -> Option<&PodUid> {
        self.place.as_ref().and_then(|place| place.pod.as_ref())
    }
}

/// The limit that a kill enforced.
#[derive(Clone, Debug, PartialEq)]
pub enum OomLimit {
    /// The limit of a cgroup was exceeded.
    Exceeded {
        /// The cgroup; `None` if it is not known by name.
        place: Option<CgroupPlace>,
        /// The limit in bytes.
        bytes: Option<u64>,
    },
    /// No limit was exceeded: the node was out of memory.
    None,
    /// Not known.
    Unknown,
}

/// The uppermost process above an OOM victim (or the victim itself) whose parent is outside of the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OomRoot {
    /// Process id in the host's PID namespace.
    pub pid: u32,
    /// It is the init of a PID namespace.
    pub is_init: bool,
    /// It is in the victim's own cgroup.
    pub in_cgroup: bool,
}

/// A cgroup and its place in the tree of pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupPlace {
    /// Path from the root of the hierarchy.
    pub path: String,
    /// What it belongs to.
    pub role: CgroupRole,
    /// The pod whose cgroup it is, or is below.
    pub pod: Option<PodUid>,
    /// The container or sandbox whose cgroup it is, or is below.
    pub container: Option<ContainerId>,
}

/// What a cgroup belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CgroupRole {
    /// The cgroup of all pods (`kubepods`).
    AllPods,
    /// A QoS class.
    QosClass,
    /// A pod.
    Pod,
    /// A container or sandbox.
    Container,
    /// A cgroup that was created below a container's.
    InContainer,
    /// Any other.
    Other,
}
