//! Records of OOM kills. Pure.

use serde::Deserialize;
use serde::Serialize;

use super::PodName;

/// Whose process was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Victim {
    /// The main process of a container.
    Main,
    /// A process that the main process has started.
    Child,
    /// A process of an exec session or an exec probe.
    Exec,
    /// A process of no container.
    Other,
    /// There is no evidence.
    Unknown,
}

impl Victim {
    /// All values.
    pub const ALL: [Self; 5] = [Self::Main, Self::Child, Self::Exec, Self::Other, Self::Unknown];

    /// The spelling in records and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Child => "child",
            Self::Exec => "exec",
            Self::Other => "other",
            Self::Unknown => "unknown",
        }
    }
}

/// Whose limit was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// The container's.
    Container,
    /// The pod's.
    Pod,
    /// That of all pods of a QoS class.
    QosClass,
    /// That of all pods.
    NodeAllocatable,
    /// That of a cgroup that belongs to no pod.
    OtherCgroup,
    /// No limit: the node was out of memory.
    Node,
    /// There is no evidence.
    Unknown,
}

impl Scope {
    /// All values.
    pub const ALL: [Self; 7] = [
        Self::Container,
        Self::Pod,
        Self::QosClass,
        Self::NodeAllocatable,
        Self::OtherCgroup,
        Self::Node,
        Self::Unknown,
    ];

    /// The spelling in records and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Pod => "pod",
            Self::QosClass => "qos-class",
            Self::NodeAllocatable => "node-allocatable",
            Self::OtherCgroup => "other-cgroup",
            Self::Node => "node",
            Self::Unknown => "unknown",
        }
    }
}

/// The evidence of a record, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Confidence {
    /// The kernel reported it at the moment of the kill.
    Kernel,
    /// A cgroup's counter of OOM kills: the number, not the processes.
    Counter,
    /// The kernel log.
    Log,
    /// The container runtime's report.
    Runtime,
}

impl Confidence {
    /// All values.
    pub const ALL: [Self; 4] = [Self::Kernel, Self::Counter, Self::Log, Self::Runtime];

    /// The spelling in records and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Counter => "counter",
            Self::Log => "log",
            Self::Runtime => "runtime",
        }
    }
}

/// The OOM killer of the kernel has killed processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OomRecord {
    /// The victim's pod, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    /// The victim's container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The runtime's id of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_id: Option<String>,
    /// Whose process.
    pub victim: Victim,
    /// The process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<OomProcess>,
    /// Whose limit was reached.
    pub scope: Scope,
    /// That limit, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// The cgroup of that limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_cgroup: Option<String>,
    /// What the process held.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<OomMemory>,
    /// Number of processes.
    pub kills: u64,
    /// It happened before observing began.
    pub earlier: bool,
    /// What this is based on.
    pub confidence: Confidence,
    /// Evidence that is missing: `process`, `pod`, `container`, `relation`, `scope`, `limit-bytes`, `memory`, `time`.
    pub missing: Vec<String>,
}

/// The process that was killed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OomProcess {
    /// Process id in the host's PID namespace.
    pub pid: u32,
    /// Command name; empty if unknown.
    pub name: String,
}

/// What a process held when it was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OomMemory {
    /// Anonymous memory.
    pub anon_bytes: u64,
    /// Memory backed by files.
    pub file_bytes: u64,
    /// Shared memory.
    pub shmem_bytes: u64,
}

impl OomMemory {
    /// All of it.
    pub fn total(self) -> u64 {
        self.anon_bytes.saturating_add(self.file_bytes).saturating_add(self.shmem_bytes)
    }
}
