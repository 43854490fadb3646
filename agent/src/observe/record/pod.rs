//! Records of pods and exits. Pure.

use serde::Deserialize;
use serde::Serialize;

use super::Timestamp;

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; for static pods the hash of the manifest.
    pub uid: String,
}

impl std::fmt::Display for PodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A pod is like this now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRecord {
    /// The pod.
    pub pod: PodName,
    /// The runtime no longer has it; all other fields are empty then.
    pub removed: bool,
    /// Its newest sandbox is ready.
    pub sandbox_ready: bool,
    /// It uses the node's network.
    pub host_network: bool,
    /// Its addresses.
    pub ips: Vec<String>,
    /// The newest instance of each container, by name.
    pub containers: Vec<ContainerView>,
}

/// State of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// Created, not started.
    Created,
    /// Running.
    Running,
    /// Exited.
    Exited,
    /// The runtime does not know.
    #[default]
    Unknown,
}

impl RunState {
    /// The spelling in records.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Exited => "exited",
            Self::Unknown => "unknown",
        }
    }
}

/// The newest instance of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerView {
    /// Its name in the pod.
    pub name: String,
    /// The runtime's id.
    pub id: String,
    /// Its image, as the runtime spells it.
    pub image: String,
    /// Its state.
    pub state: RunState,
    /// How often it was restarted.
    pub restarts: u32,
    /// When it was started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// How this instance, or else the one before, has exited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<ExitInfo>,
}

/// How a container has exited.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExitInfo {
    /// Exit code, 128 + signal for signals; absent if neither kernel nor runtime reported it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The runtime's reason, such as `Completed`, `Error`, `OOMKilled`; empty if it gave none.
    pub reason: String,
    /// The runtime's message, shortened.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// When it finished, by the runtime.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<Timestamp>,
    /// The kernel or the runtime says that its main process was killed by the OOM killer.
    pub oom_killed: bool,
}

/// The source that reported an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExitSource {
    /// The kernel, before the runtime.
    Kernel,
    /// The runtime.
    Runtime,
}

/// A container has exited.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExitRecord {
    /// Its pod.
    pub pod: PodName,
    /// Its name.
    pub container: String,
    /// The runtime's id of the instance.
    pub id: String,
    /// Code, reason and time of the exit.
    #[serde(flatten)]
    pub exit: ExitInfo,
    /// The source that reported it first.
    pub source: ExitSource,
    /// It happened before observing began.
    pub earlier: bool,
}
