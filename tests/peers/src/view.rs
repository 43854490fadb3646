//! Pods as the runtime reports them to its supervisor, independently of the agent under test.

use serde::Deserialize;
use serde::Serialize;

/// A pod sandbox with its containers.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct PodView {
    /// The sandbox's id.
    pub id: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// Counts the sandboxes of a pod from zero.
    pub attempt: u32,
    /// Whether the sandbox is ready.
    pub ready: bool,
    /// The pod's address, empty on the host's network.
    pub ip: String,
    /// Its containers, by name and attempt.
    pub containers: Vec<ContainerView>,
}

/// A container, running or not.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ContainerView {
    /// The container's id.
    pub id: String,
    /// Its name in the pod.
    pub name: String,
    /// Counts the restarts from zero.
    pub attempt: u32,
    /// `created`, `running`, `exited` or `unknown`.
    pub state: String,
    /// Exit code, if it has exited.
    pub exit_code: i32,
    /// The runtime's reason, such as `Completed`, `Error` or `OOMKilled`.
    pub reason: String,
    /// The process id of its first process, while it runs.
    pub pid: Option<i32>,
    /// When it started, in nanoseconds of the wall clock; zero if it did not.
    pub started_at: i64,
    /// When it ended, in nanoseconds of the wall clock; zero if it did not.
    pub finished_at: i64,
}

impl PodView {
    /// The last instance of a container.
    pub fn latest(&self, name: &str) -> Option<&ContainerView> {
        self.containers.iter().filter(|container| container.name == name).max_by_key(|container| container.attempt)
    }
}
