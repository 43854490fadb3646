//! State of the runtime: sandboxes, containers, and the names they reserve.
//!
//! Beside the reported status each record has the real state of its process; only the lifecycle code copies the latter
//! to the former. No clock, no waiting, no faults.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::HashMap;

use keblet_proto::cri::v1;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::program::Exit;
use super::program::Program;

/// A pod sandbox.
#[derive(Debug)]
pub(super) struct Sandbox {
    /// Sandbox id.
    pub id: String,
    /// The reserved name: `POD_NAMESPACE_UID_ATTEMPT`.
    pub name: String,
    /// As given by the client.
    pub config: v1::PodSandboxConfig,
    /// As given by the client.
    pub runtime_handler: String,
    /// Unix nanoseconds.
    pub created_at: i64,
    /// As the runtime reports it.
    pub ready: bool,
    /// Empty on the host network.
    pub ip: String,
    /// The pause process, while it runs.
    pub pid: Option<u32>,
    /// Fires when the runtime has recorded the exit of the pause process.
    pub stopped: CancellationToken,
}

/// A container.
#[derive(Debug)]
pub(super) struct Container {
    /// Container id.
    pub id: String,
    /// Its sandbox.
    pub sandbox_id: String,
    /// The reserved name: `NAME_POD_NAMESPACE_UID_ATTEMPT`.
    pub name: String,
    /// As given by the client.
    pub config: v1::ContainerConfig,
    /// The resolved image.
    pub image: v1::Image,
    /// Absolute log path, empty if none was requested.
    pub log_path: String,
    /// Current resource limits.
    pub resources: Option<v1::LinuxContainerResources>,
    /// Cgroup of the container's processes.
    pub cgroup: String,
    /// Mode of its PID namespace.
    pub pid_mode: v1::NamespaceMode,
    /// Its behaviour once started.
    pub program: Program,
    /// As the runtime reports it.
    pub status: ReportedStatus,
    /// Its init process, once started.
    pub process: Option<Process>,
    /// The runtime has had an OOM event for it: it reports its exit as `OOMKilled`, whatever the victim was.
    pub oom_event: bool,
    /// A start is under way.
    pub starting: bool,
    /// A removal is under way.
    pub removing: bool,
    /// Fires when the runtime has recorded its exit.
    pub stopped: CancellationToken,
}

/// Status that the runtime reports of a container.
#[derive(Clone, Debug)]
pub(super) struct ReportedStatus {
    /// Container state.
    pub state: v1::ContainerState,
    /// Host pid while running.
    pub pid: u32,
    /// Unix nanoseconds.
    pub created_at: i64,
    /// Unix nanoseconds, 0 before.
    pub started_at: i64,
    /// Unix nanoseconds, 0 before.
    pub finished_at: i64,
    /// Valid once exited.
    pub exit_code: i32,
    /// Reason the runtime recorded, empty for an ordinary exit.
    pub reason: String,
    /// Message the runtime recorded.
    pub message: String,
}

/// Real state of a container's init process.
#[derive(Clone, Debug)]
pub(super) struct Process {
    /// Host pid.
    pub pid: u32,
    /// Its exit, and the time in Unix nanoseconds.
    pub exit: Option<(Exit, i64)>,
}

impl Container {
    /// Whether its init process is running.
    pub(super) fn is_alive(&self) -> bool {
        self.process.as_ref().is_some_and(|process| process.exit.is_none())
    }

    /// Whether its init process is the init of its own PID namespace.
    pub(super) fn ns_init(&self) -> bool {
        self.pid_mode == v1::NamespaceMode::Container
    }

    /// `metadata` of its config.
    pub(super) fn metadata(&self) -> v1::ContainerMetadata {
        self.config.metadata.clone().unwrap_or_default()
    }
}

impl Sandbox {
    /// `metadata` of its config.
    pub(super) fn metadata(&self) -> v1::PodSandboxMetadata {
        self.config.metadata.clone().unwrap_or_default()
    }

    /// Namespace options of the client's request.
    pub(super) fn namespaces(&self) -> v1::NamespaceOption {
        let security = self.config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        security.and_then(|context| context.namespace_options.clone()).unwrap_or_default()
    }
}

/// All sandboxes and containers.
#[derive(Debug, Default)]
pub(super) struct Store {
    /// By id.
    pub sandboxes: BTreeMap<String, Sandbox>,
    /// By id.
    pub containers: BTreeMap<String, Container>,
    by_sandbox: HashMap<String, BTreeSet<String>>,
    sandbox_names: HashMap<String, String>,
    container_names: HashMap<String, String>,
}

impl Store {
    /// Reserves a sandbox name for `id`.
    ///
    /// # Errors
    /// The name is reserved.
    pub(super) fn reserve_sandbox(&mut self, name: &str, id: &str) -> Result<(), Status> {
        reserve(&mut self.sandbox_names, "sandbox", name, id)
    }

    /// Reserves a container name for `id`.
    ///
    /// # Errors
    /// The name is reserved.
    pub(super) fn reserve_container(&mut self, name: &str, id: &str) -> Result<(), Status> {
        reserve(&mut self.container_names, "container", name, id)
    }

    /// Releases a name whose object was not created.
    pub(super) fn release(&mut self, id: &str) {
        self.sandbox_names.retain(|_, holder| holder != id);
        self.container_names.retain(|_, holder| holder != id);
    }

    /// The sandbox, or containerd's error.
    ///
    /// # Errors
    /// containerd's error for a missing sandbox.
    pub(super) fn sandbox(&self, id: &str) -> Result<&Sandbox, Status> {
        self.sandboxes.get(id).ok_or_else(|| {
            Status::not_found(format!("an error occurred when try to find sandbox: sandbox {id:?}: not found"))
        })
    }

    /// The container, or containerd's error.
    ///
    /// # Errors
    /// containerd's error for a missing container.
    pub(super) fn container(&self, id: &str) -> Result<&Container, Status> {
        self.containers.get(id).ok_or_else(|| missing_container(id))
    }

    /// The container, or containerd's error.
    ///
    /// # Errors
    /// containerd's error for a missing container.
    pub(super) fn container_mut(&mut self, id: &str) -> Result<&mut Container, Status> {
        self.containers.get_mut(id).ok_or_else(|| missing_container(id))
    }

    /// Adds a container to its sandbox.
    pub(super) fn insert_container(&mut self, container: Container) {
        self.by_sandbox.entry(container.sandbox_id.clone()).or_default().insert(container.id.clone());
        self.containers.insert(container.id.clone(), container);
    }

    /// Removes a container and frees its name.
    pub(super) fn remove_container(&mut self, id: &str) -> Option<Container> {
        let container = self.containers.remove(id)?;
        self.container_names.remove(&container.name);
        if let Some(ids) = self.by_sandbox.get_mut(&container.sandbox_id) {
            ids.remove(id);
        }
        Some(container)
    }

    /// Removes a sandbox and frees its name.
    pub(super) fn remove_sandbox(&mut self, id: &str) {
        if let Some(sandbox) = self.sandboxes.remove(id) {
            self.sandbox_names.remove(&sandbox.name);
            self.by_sandbox.remove(id);
        }
    }

    /// Ids of the containers of a sandbox.
    pub(super) fn containers_of(&self, sandbox_id: &str) -> Vec<String> {
        self.by_sandbox.get(sandbox_id).map(|ids| ids.iter().cloned().collect()).unwrap_or_default()
    }

    /// Drops names without an object, as a runtime that rebuilds its tables does.
    pub(super) fn rebuild_names(&mut self) {
        self.sandbox_names = self.sandboxes.values().map(|s| (s.name.clone(), s.id.clone())).collect();
        self.container_names = self.containers.values().map(|c| (c.name.clone(), c.id.clone())).collect();
    }
}

fn reserve(names: &mut HashMap<String, String>, kind: &str, name: &str, id: &str) -> Result<(), Status> {
    match names.get(name) {
        Some(holder) if holder != id => Err(Status::unknown(format!(
            "failed to reserve {kind} name {name:?}: name {name:?} is reserved for {holder:?}"
        ))),
        _ => {
            names.insert(name.to_owned(), id.to_owned());
            Ok(())
        }
    }
}

fn missing_container(id: &str) -> Status {
    Status::not_found(format!("an error occurred when try to find container {id:?}: not found"))
}
