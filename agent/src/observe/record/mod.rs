//! Records of an observed node: one set of types for the JSON lines, the terminal view, the metrics and the reports. Each of
//! them is a fold over these records, so that recorded lines can be viewed later. The schema is documented in
//! `docs/observe.md` and `docs/observe.schema.json`. Pure.

mod oom;
mod pod;
mod pressure;
mod time;

use serde::Deserialize;
use serde::Deserializer;
use serde::Serialize;
use serde::Serializer;

pub use oom::Confidence;
pub use oom::OomMemory;
pub use oom::OomProcess;
pub use oom::OomRecord;
pub use oom::Scope;
pub use oom::Victim;
pub use pod::ContainerView;
pub use pod::ExitInfo;
pub use pod::ExitRecord;
pub use pod::ExitSource;
pub use pod::PodName;
pub use pod::PodRecord;
pub use pod::RunState;
pub use pressure::PressureRecord;
pub use pressure::PressureScope;
pub use pressure::Reclaim;
pub use pressure::Resource;
pub use pressure::Stall;
pub use pressure::StallCause;
pub use pressure::StallRecord;
pub use pressure::Waiting;
pub use time::Timestamp;

/// Name and version of the schema, in every line. Fields may be added within a version; consumers ignore unknown ones.
pub const SCHEMA: &str = "keblet.dev/observe/v1";

/// One line of `keblet observe --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Always [`SCHEMA`].
    pub schema: Schema,
    /// When it happened, or when it was measured.
    pub time: Timestamp,
    /// The event or measurement.
    #[serde(flatten)]
    pub record: Record,
}

impl Line {
    /// A record with its time.
    pub fn new(time: Timestamp, record: Record) -> Self {
        Self { schema: Schema, time, record }
    }
}

/// Writes [`SCHEMA`], and accepts nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schema;

impl Serialize for Schema {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(SCHEMA)
    }
}

impl<'de> Deserialize<'de> for Schema {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let found = String::deserialize(deserializer)?;
        let unknown = || serde::de::Error::custom(format!("schema {found:?} is not {SCHEMA}"));
        (found == SCHEMA).then_some(Self).ok_or_else(unknown)
    }
}

/// The kinds of records.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Record {
    /// Observing began.
    Start(Start),
    /// The container runtime answered.
    Runtime(RuntimeRecord),
    /// A source of evidence has changed its state.
    Sensor(SensorRecord),
    /// What was there when observing began has been reported.
    Ready(Ready),
    /// The present state of a pod.
    Pod(PodRecord),
    /// A container has exited.
    Exit(ExitRecord),
    /// The OOM killer of the kernel has killed processes.
    Oom(OomRecord),
    /// Pressure of the node or a pod.
    Pressure(PressureRecord),
    /// A pod waits, and why.
    Stall(StallRecord),
    /// Records of the kernel were lost.
    Lost(Lost),
}

impl Record {
    /// The kinds, as they are spelt.
    pub const KINDS: [&str; 10] =
        ["start", "runtime", "sensor", "ready", "pod", "exit", "oom", "pressure", "stall", "lost"];
}

/// Observing began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Start {
    /// Name of the node.
    pub node: String,
    /// Version of keblet.
    pub version: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Version of the cgroups: `v1` or `v2`.
    pub cgroups: String,
    /// Sources of evidence at start.
    pub sensors: Vec<SensorRecord>,
}

/// The container runtime.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeRecord {
    /// Such as `containerd`.
    pub name: String,
    /// The runtime's own version.
    pub version: String,
    /// Its socket.
    pub endpoint: String,
}

/// A source of evidence.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SensorRecord {
    /// Its name, as in `keblet_sensor_state`.
    pub sensor: String,
    /// `up`, `degraded`, `down` or `off`.
    pub state: String,
    /// Why it is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What is lost by that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<String>,
}

/// What was there when observing began has been reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Ready {
    /// Pods that the runtime has.
    pub pods: u64,
}

/// Records of the kernel that were dropped, or cgroups that are not watched, because a buffer or map was full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lost {
    /// Records of exits and OOM kills.
    pub exits: u64,
    /// Records of cgroups.
    pub cgroups: u64,
    /// Cgroups that are not watched.
    pub watches: u64,
}

#[cfg(test)]
pub(crate) mod samples;
#[cfg(test)]
mod tests;
