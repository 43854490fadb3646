//! What the runtime reported of one pod, with the moment before the call. Only `pleg` puts snapshots into the pod cache.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::ContainerId;
use super::PodRef;
use super::SandboxId;

/// CRI container state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum ContainerState {
    /// Created, not started (yet).
    Created,
    /// Its init process runs, as far as known.
    Running,
    /// Its init process is gone.
    Exited,
    /// The runtime does not know.
    Unknown,
}

/// Everything the runtime reported of one pod at one moment, all sandboxes included.
#[derive(Clone, Debug, PartialEq)]
pub struct PodSnapshot {
    /// The pod. Name and namespace are empty if the runtime has nothing of it.
    pub pod: PodRef,
    /// Sandboxes, newest first (attempt, then creation time, then id, descending).
    pub sandboxes: Vec<SandboxStatus>,
    /// Containers of all sandboxes, newest first (attempt, then creation time, then id, descending).
    pub containers: Vec<ContainerStatus>,
    /// IPs of the newest sandbox if it is ready; else the last ones known while no sandbox is ready.
    pub ips: Vec<String>,
    /// The moment just before the call to the runtime: everything that had happened by then is included.
    pub sampled_at: Instant,
}

impl PodSnapshot {
    /// A pod of which the runtime has nothing.
    pub fn empty(pod: PodRef, sampled_at: Instant) -> Self {
        Self { pod, sandboxes: Vec::new(), containers: Vec::new(), ips: Vec::new(), sampled_at }
    }

    /// The newest instance of the container called `name`, over all sandboxes.
    pub fn newest(&self, name: &str) -> Option<&ContainerStatus> {
        self.containers.iter().find(|c| c.name == name)
    }

    /// The container instance with this id.
    pub fn by_id(&self, id: &ContainerId) -> Option<&ContainerStatus> {
        self.containers.iter().find(|c| &c.id == id)
    }

    /// Indexes the newest instance of each container by name. Callers with many look-ups use it instead of [`Self::newest`],
    /// which searches linearly.
    pub fn newest_by_name(&self) -> HashMap<&str, &ContainerStatus> {
        self.containers.iter().rev().map(|c| (c.name.as_str(), c)).collect()
    }

    /// [`Self::by_id`] of all ids, for the same purpose.
    pub fn containers_by_id(&self) -> HashMap<&ContainerId, &ContainerStatus> {
        self.containers.iter().rev().map(|c| (&c.id, c)).collect()
    }

    /// Containers of the newest sandbox, provided it is ready ("active" containers).
    pub fn active(&self) -> impl Iterator<Item = &ContainerStatus> {
        let sandbox = self.sandboxes.first().filter(|s| s.ready).map(|s| &s.id);
        self.containers.iter().filter(move |c| Some(&c.sandbox_id) == sandbox)
    }

    /// Running containers, newest first.
    pub fn running(&self) -> impl Iterator<Item = &ContainerStatus> {
        self.containers.iter().filter(|c| c.state == ContainerState::Running)
    }
}

/// CRI `PodSandboxStatus`, reduced to what decisions need.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxStatus {
    /// Sandbox id.
    pub id: SandboxId,
    /// `metadata.attempt`.
    pub attempt: u32,
    /// SANDBOX_READY.
    pub ready: bool,
    /// Nanoseconds since the Unix epoch.
    pub created_at: i64,
    /// Primary IP first; empty with host network.
    pub ips: Vec<String>,
    /// The runtime reports on the network of the sandbox: without addresses it has none.
    pub reports_network: bool,
    /// The sandbox uses the node's network namespace.
    pub host_network: bool,
    /// Processes of this pod's containers may outlive their init process (host or shared PID namespace).
    pub shares_pid_namespace: bool,
    /// Runtime handler, empty for the default one.
    pub runtime_handler: String,
    /// The pod is a static one, as the sandbox's annotations say.
    pub is_static: bool,
}

/// CRI `ContainerStatus`, with the agent's own annotations read back.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerStatus {
    /// Container id.
    pub id: ContainerId,
    /// The container's sandbox.
    pub sandbox_id: SandboxId,
    /// `metadata.name`: the container's name in the pod spec.
    pub name: String,
    /// `metadata.attempt`.
    pub attempt: u32,
    /// Runtime state, with a proven exit applied over it.
    pub state: ContainerState,
    /// Nanoseconds since the Unix epoch.
    pub created_at: i64,
    /// Nanoseconds since the Unix epoch; 0 if never started.
    pub started_at: i64,
    /// Nanoseconds since the Unix epoch; 0 while not exited.
    pub finished_at: i64,
    /// Exit code (128 + signal for signals). `None` unless exited, or when the exit is proven or reported but its code is
    /// not known yet.
    pub exit_code: Option<i32>,
    /// Runtime's brief reason (`Completed`, `Error`, `OOMKilled`, ...), corrected where an OOM verdict contradicts it.
    /// Empty while a proven exit is unconfirmed.
    pub reason: String,
    /// Runtime's message, with the termination message appended.
    pub message: String,
    /// Image as the runtime spells it.
    pub image: String,
    /// Image reference (digest or id) the runtime resolved.
    pub image_ref: String,
    /// Annotation `io.kubernetes.container.hash`; 0 if missing.
    pub hash: u64,
    /// Annotation `io.kubernetes.container.restartCount`; 0 if missing.
    pub restart_count: u32,
    /// User of the init process, if the runtime reports it (KEP-3619).
    pub user: Option<ContainerUser>,
    /// Signal that stops the container, by its name in the CRI, if the runtime reports it (KEP-4960).
    pub stop_signal: Option<&'static str>,
    /// Resources that the runtime reports (KEP-1287).
    pub resources: ContainerResources,
    /// Log file path.
    pub log_path: String,
    /// Where the container leaves its termination message.
    pub termination: TerminationFile,
    /// The init process in the host PID namespace, once known. `None` for runtimes that do not report it (`info.pid`).
    pub pid: Option<u32>,
    /// Set while `state` is `Exited` by kernel proof and the runtime has not confirmed it yet.
    pub proven: Option<ProvenExit>,
    /// The exit happened while this process observed the container: `reason` agrees with the kernel's evidence.
    pub exit_observed: bool,
}

impl ContainerStatus {
    /// The caller of StartContainer was gone before the container was started, as when the agent is killed: it was not the
    /// container that failed. containerd ends it with code 128 and Go's text for a cancelled context, or with the signal
    /// that ended the launch of the shim. Its process may have run for a moment, until containerd killed it.
    pub fn start_was_cancelled(&self) -> bool {
        // Not without the reason: the message of an exit that only the kernel has reported is the container's own.
        let is_start_error =
            self.state == ContainerState::Exited && self.started_at == 0 && self.reason == "StartError";
        // At its end: the container's own words, as in a command that is not found, stand before it.
        let message = self.message.trim_end().trim_end_matches(": unknown");
        let launch_killed = message.contains("failed to start shim") && message.ends_with("signal: killed");
        is_start_error && (message.ends_with("context canceled") || launch_killed)
    }
}

/// CRI `LinuxContainerUser`: what the container's init process was started as.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ContainerUser {
    /// Primary user id.
    pub uid: i64,
    /// Primary group id.
    pub gid: i64,
    /// Supplemental groups, the image's included unless the pod's policy is `Strict`.
    pub supplemental_groups: Vec<i64>,
}

/// CRI `ContainerStatus.resources`, as far as reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ContainerResources {
    /// CPU request, thousandths of a CPU.
    pub cpu_request: Option<i64>,
    /// CPU limit, thousandths of a CPU.
    pub cpu_limit: Option<i64>,
    /// Memory limit, bytes.
    pub memory_limit: Option<i64>,
}

/// Termination message: settings, read back from annotations and mounts, and what depends on a code that is not final.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TerminationFile {
    /// Path inside the container.
    pub container_path: String,
    /// Host file mounted there, if any.
    pub host_path: Option<String>,
    /// `terminationMessagePolicy` is `FallbackToLogsOnError`.
    pub fallback_to_logs: bool,
    /// The message without the end of the log, which was appended for a code that stands for one that the runtime has yet to
    /// learn: it may turn out to be 0.
    pub before_log: Option<String>,
}

/// Proof by the kernel that a container's init process is gone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProvenExit {
    /// When the process was seen to be gone, on this process' monotonic clock.
    pub seen_at: Instant,
    /// How long before `seen_at` the kernel recorded the exit, if a probe reported it.
    pub kernel_age: Option<Duration>,
    /// Exit code (128 + signal), if the kernel reported it.
    pub exit_code: Option<i32>,
    /// The process was chosen by the OOM killer.
    pub oom_killed: bool,
}
