//! Records of pressure, and of waiting pods with the cause. Pure.

use serde::Deserialize;
use serde::Serialize;

use super::PodName;

/// What tasks wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resource {
    /// A processor.
    Cpu,
    /// Memory.
    Memory,
    /// Input and output.
    Io,
}

impl Resource {
    /// All, in the order of columns.
    pub const ALL: [Self; 3] = [Self::Cpu, Self::Memory, Self::Io];

    /// The spelling in records and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Io => "io",
        }
    }
}

/// What a pressure record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PressureScope {
    /// The node.
    Node,
    /// A pod.
    Pod,
}

/// Pressure and usage of the node or a pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PressureRecord {
    /// Node or pod.
    pub scope: PressureScope,
    /// The pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodName>,
    /// Waiting for processors (PSI); absent where the kernel does not measure it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Waiting>,
    /// Waiting for memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Waiting>,
    /// Waiting for input and output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<Waiting>,
    /// Direct memory reclaim, counted by a probe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaim: Option<Reclaim>,
    /// CPU time used since the last record, in CPUs; absent in the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Memory in use, in bytes. Of the node: without what is available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Limit on memory, in bytes. Of the node: all memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_bytes: Option<u64>,
}

impl PressureRecord {
    /// Nothing is known.
    pub fn empty(scope: PressureScope, pod: Option<PodName>) -> Self {
        let (cpu, memory, io, reclaim) = (None, None, None, None);
        Self { scope, pod, cpu, memory, io, reclaim, cpus: None, memory_bytes: None, memory_limit_bytes: None }
    }

    /// Waiting for a resource.
    pub fn waiting(&self, resource: Resource) -> Option<Waiting> {
        match resource {
            Resource::Cpu => self.cpu,
            Resource::Memory => self.memory,
            Resource::Io => self.io,
        }
    }
}

/// One pressure file (<https://docs.kernel.org/accounting/psi.html>).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waiting {
    /// At least one task waited.
    pub some: Stall,
    /// All tasks waited.
    pub full: Stall,
}

/// One line of a pressure file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Stall {
    /// Percent of the last 10 seconds.
    pub avg10: f64,
    /// Percent of the last minute.
    pub avg60: f64,
    /// Percent of the last five minutes.
    pub avg300: f64,
    /// Since the start, in seconds.
    pub total_seconds: f64,
}

/// Direct memory reclaim by processes of a pod, since it is observed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reclaim {
    /// Number of times that a process had to reclaim memory itself.
    pub stalls: u64,
    /// How long in all processes together.
    pub total_seconds: f64,
}

/// Why a pod waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StallCause {
    /// It has reached a limit of its own.
    OwnLimit,
    /// It uses most of what it waits for.
    Itself,
    /// Another pod uses most of it.
    OtherPod,
    /// No pod stands out.
    Unknown,
}

impl StallCause {
    /// The spelling in records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OwnLimit => "own-limit",
            Self::Itself => "itself",
            Self::OtherPod => "other-pod",
            Self::Unknown => "unknown",
        }
    }
}

/// A pod waits, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StallRecord {
    /// The pod that waits.
    pub pod: PodName,
    /// What it waits for.
    pub resource: Resource,
    /// Percent of the time since the last measurement.
    pub percent: f64,
    /// What the waiting is attributed to.
    pub cause: StallCause,
    /// The pod that uses most of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<PodName>,
    /// What the cause was concluded from.
    pub evidence: String,
}
