//! The actions on one pod: the result of the pure plan, executed by `workers::act`.
//!
//! Order of execution (upstream `SyncPod`): kill pod, or else kill containers; removals; prune; sandbox; resize; starts in
//! the given order (ephemeral, init and sidecars, regular).

use std::time::SystemTime;

use super::ContainerId;
use super::SandboxId;
use super::resources::Compute;

/// What to do about the sandbox.
#[derive(Clone, Debug, PartialEq)]
pub enum SandboxPlan {
    /// Keep this one and start containers in it.
    Keep(SandboxId),
    /// Make a new one with this attempt number.
    Create {
        /// `metadata.attempt` of the new sandbox.
        attempt: u32,
        /// An older sandbox is replaced: event SandboxChanged is due.
        replaces: Option<SandboxId>,
    },
    /// Neither keep nor create (nothing is to run).
    None,
}

/// Which list of the pod spec a container is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ContainerClass {
    /// `spec.ephemeralContainers`.
    Ephemeral,
    /// `spec.initContainers`, run to completion.
    Init,
    /// `spec.initContainers` with `restartPolicy: Always` (KEP-753).
    Sidecar,
    /// `spec.containers`.
    Regular,
}

/// Start one container.
#[derive(Clone, Debug, PartialEq)]
pub struct StartContainer {
    /// Which list of the spec.
    pub class: ContainerClass,
    /// Position in that list (`spec.initContainers` for init and sidecars).
    pub index: usize,
    /// Container name, for logs and results.
    pub name: String,
    /// restartCount and attempt of the new instance if an older one is visible; else `workers::act` derives them from the
    /// log directory, as upstream's `calcRestartCountByLogDir`.
    pub restart_count: Option<u32>,
    /// Finish time (ns since the Unix epoch) of the newest exited instance, if any: what the crash-loop back-off
    /// goes by.
    pub last_finished_at: Option<i64>,
    /// Instances that were created and, as far as the runtime says, never started. Their start may have been requested by a
    /// call that was cancelled, and may still succeed: they are removed first, and as long as the runtime refuses that,
    /// nothing is started.
    pub replaces: Vec<ContainerId>,
    /// Set when the crash-loop back-off forbids the start for now.
    pub blocked: Option<Blocked>,
}

/// A start held back by crash-loop back-off.
#[derive(Clone, Debug, PartialEq)]
pub struct Blocked {
    /// The delay in force, in whole seconds as shown in messages.
    pub backoff: std::time::Duration,
    /// When it ends.
    pub until: SystemTime,
}

/// Why a container is killed; decides events and grace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KillReason {
    /// The whole pod ends.
    PodKilled,
    /// Its definition (name, image) changed.
    DefinitionChanged,
    /// Its state is unknown.
    UnknownState,
    /// It runs in a sandbox that was replaced.
    SandboxReplaced,
    /// A sibling's exit rule says RestartAllContainers.
    RestartAll,
    /// Liveness probe failed.
    Liveness,
    /// Startup probe failed.
    Startup,
    /// Its postStart hook failed.
    PostStartFailed,
    /// Its resources change, and its policy says that it is restarted for that.
    Resize,
}

/// Kill one container instance.
#[derive(Clone, Debug, PartialEq)]
pub struct KillContainer {
    /// The instance.
    pub id: ContainerId,
    /// Its name in the spec.
    pub name: String,
    /// Why it is killed.
    pub reason: KillReason,
    /// Text of the Killing event.
    pub message: String,
    /// Replaces the computed grace period, in seconds.
    pub grace_override: Option<i64>,
}

/// Remove one dead container instance.
#[derive(Clone, Debug, PartialEq)]
pub struct RemoveContainer {
    /// The instance.
    pub id: ContainerId,
    /// Its name in the spec.
    pub name: String,
    /// Its log files stay.
    pub keep_logs: bool,
}

/// Change the resources of one running container.
#[derive(Clone, Debug, PartialEq)]
pub struct ResizeContainer {
    /// The instance.
    pub id: ContainerId,
    /// Its name in the spec.
    pub name: String,
    /// What is in force.
    pub from: Compute,
    /// What is allocated.
    pub to: Compute,
}

/// Apply allocated resources to a pod that runs (KEP-1287). Memory first, then CPU, each list in its order: those that get
/// less come first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResizePod {
    /// Containers whose memory changes.
    pub memory: Vec<ResizeContainer>,
    /// Containers whose CPU changes.
    pub cpu: Vec<ResizeContainer>,
    /// `spec.resources` is not what was applied.
    pub pod_level: bool,
    /// Memory may shrink, so that it must not be in use: that of a container or `spec.resources` changes, or a container is
    /// restarted.
    pub checks_memory: bool,
}

/// The plan for one pod.
#[derive(Clone, Debug, PartialEq)]
pub struct PodActions {
    /// Kill all running containers and stop every sandbox first.
    pub kill_pod: bool,
    /// The sandbox to use.
    pub sandbox: SandboxPlan,
    /// Containers to kill (only if not `kill_pod`).
    pub kill: Vec<KillContainer>,
    /// Instances to remove (RestartAllContainers), in order; the first failure ends the sync.
    pub remove: Vec<RemoveContainer>,
    /// Old init container instances to remove; failures are only logged.
    pub prune: Vec<RemoveContainer>,
    /// Resources to change, before anything is started. The pod's own cgroup follows.
    pub resize: Option<ResizePod>,
    /// Containers to start, in order.
    pub start: Vec<StartContainer>,
    /// A decision depends on an exit code that is not known yet, since the exit is proven by pidfd alone or the runtime does
    /// not report the code yet: decide again at the next snapshot.
    pub await_confirmation: bool,
}

impl PodActions {
    /// True if executing this plan would change nothing.
    pub fn is_idle(&self) -> bool {
        !self.kill_pod
            && !matches!(self.sandbox, SandboxPlan::Create { .. })
            && self.kill.is_empty()
            && self.remove.is_empty()
            && self.prune.is_empty()
            && self.resize.is_none()
            && self.start.is_empty()
    }

    /// True if containers are to be stopped, each of which may use its grace period.
    pub fn stops_containers(&self) -> bool {
        self.kill_pod || !self.kill.is_empty()
    }
}
