//! Rotation of container logs (`containerLogMaxSize`, `containerLogMaxFiles`): renames a log that has grown too large, lets
//! the runtime open a new one, compresses and deletes older ones.
//!
//! ```text
//!  pod cache ─▶ stat of each running container's log ─▶ too large ─▶ plan ─▶ delete, compress ─▶ rename
//!                  every containerLogMonitorInterval   ─▶ missing ────────────────────────────────┴▶ ReopenContainerLog
//! ```
//!
//! The kubelet asks the runtime for all containers and for the status of each one at every interval. Here a log that does
//! not grow costs a stat and no runtime call. The runtime writes to the renamed file until it has opened the new one, so no
//! line is lost; if that fails, the file gets its name back. An agent that is killed in between leaves a log without its
//! name: the next one lets the runtime open a new file, or gives it back to a container that has exited. What it cannot
//! recover is tried again with growing pauses.

mod files;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::civil::DateTime;
use tokio::sync::Semaphore;
use tokio::task;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use self::files::Found;
use self::files::Log;
pub use self::plan::plain as plain_files;
use crate::model::Clock;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::retry::Operation;
use crate::retry::RetryTracker;
use crate::runtime::Runtime;
use crate::runtime::RuntimeError;

/// When logs are rotated and how much of them is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Size from which on a log is rotated, bytes (`containerLogMaxSize`).
    pub max_size: u64,
    /// Files of one container, the log itself included; at least 2 (`containerLogMaxFiles`).
    pub max_files: usize,
    /// Logs that are rotated at the same time; at least 1 (`containerLogMaxWorkers`).
    pub workers: usize,
    /// Time between two checks (`containerLogMonitorInterval`).
    pub interval: Duration,
}

/// What the rotation works with.
pub struct Parts {
    /// When and how much.
    pub policy: Policy,
    /// All cached snapshots of pods.
    pub pods: Arc<dyn Fn() -> Vec<Arc<PodSnapshot>> + Send + Sync>,
    /// The container runtime.
    pub runtime: Runtime,
    /// The wall clock.
    pub clock: Clock,
    /// The node's local time, for file names.
    pub local_time: fn() -> DateTime,
    /// Logs that could not be rotated or recovered.
    pub retries: RetryTracker,
}

/// Why a log was not rotated. Nothing is lost; a later check tries again.
#[derive(Debug, thiserror::Error)]
enum RotationError {
    /// A file operation failed.
    #[error("cannot {attempt} {}: {source}", path.display())]
    File { attempt: &'static str, path: PathBuf, source: io::Error },
    /// The runtime did not open a new file.
    #[error("the runtime did not open a new log: {0}")]
    Reopen(#[from] RuntimeError),
    /// The log was renamed and could not be renamed back.
    #[error("the runtime did not open a new log: {reopen}; {rename}")]
    RenameBack { reopen: RuntimeError, rename: Box<Self> },
}

/// One container's log, as of a snapshot.
#[derive(Clone, Debug)]
struct Container {
    id: ContainerId,
    log: Log,
    is_running: bool,
    /// It may have been in the middle of a rotation when the previous agent ended.
    to_recover: bool,
}

/// What is to be done about a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Due {
    /// It is too large.
    Rotate,
    /// There is none, so the runtime writes to a file without its name.
    Reopen,
}

/// What a check has found of a log.
struct Examined {
    container: Container,
    /// The outcome of a recovery, if one was due.
    recovered: Option<Result<(), RotationError>>,
    due: Option<Due>,
}

/// What a task has done.
enum Done {
    /// The logs that have to be rotated, or that were to be recovered.
    Checked(Vec<Examined>),
    Rotated(Result<(), RotationError>),
}

/// Rotates logs until `shutdown`. A rotation in progress is abandoned then, in a state from which the next agent continues.
pub async fn run(parts: Parts, shutdown: CancellationToken) {
    let mut rotation = Rotation {
        workers: Arc::new(Semaphore::new(parts.policy.workers.max(1))),
        started_at: parts.clock.wall_nanos(),
        parts,
        ends: shutdown.clone(),
        tasks: JoinSet::new(),
        check: None,
        in_progress: HashMap::new(),
        recovered: HashSet::new(),
    };
    let mut checks = tokio::time::interval(rotation.parts.policy.interval);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = checks.tick() => rotation.check(),
            Some(ended) = rotation.tasks.join_next_with_id() => rotation.ended(ended),
        }
    }
}

struct Rotation {
    parts: Parts,
    ends: CancellationToken,
    workers: Arc<Semaphore>,
    tasks: JoinSet<Done>,
    /// The check in progress. A file system that hangs delays the next one, and nothing else.
    check: Option<task::Id>,
    /// Rotations in progress or waiting for a worker, no more than one of each container.
    in_progress: HashMap<task::Id, Container>,
    /// Containers without anything that an earlier agent left behind.
    recovered: HashSet<ContainerId>,
    /// When this agent was started; nanoseconds since the Unix epoch.
    started_at: i64,
}

impl Rotation {
    /// Starts to check all logs, unless a check is in progress.
    fn check(&mut self) {
        if self.check.is_some() {
            return;
        }
        let containers = self.containers();
        let max_size = self.parts.policy.max_size;
        let check = self.tasks.spawn_blocking(move || {
            let examined = containers.into_iter().map(|container| examine(container, max_size));
            Done::Checked(examined.filter(|log| log.recovered.is_some() || log.due.is_some()).collect())
        });
        self.check = Some(check.id());
    }

    /// Running containers, and those whose log has to be recovered.
    fn containers(&mut self) -> Vec<Container> {
        let pods = (self.parts.pods)();
        let all = || pods.iter().flat_map(|pod| &pod.containers);
        let listed: HashSet<&ContainerId> = all().map(|status| &status.id).collect();
        self.recovered.retain(|id| listed.contains(id));
        let running = || all().filter(|status| status.state == ContainerState::Running);
        let target = |status: &ContainerStatus| Log::at(&status.log_path).map(|log| target_of(&log));
        self.parts.retries.keep_listed(Operation::RotateLog, || running().filter_map(target).collect());
        self.parts.retries.keep_listed(Operation::RecoverLog, || all().filter_map(target).collect());
        let mut containers = Vec::new();
        for status in all() {
            let is_running = status.state == ContainerState::Running;
            let is_left = status.created_at < self.started_at && !self.recovered.contains(&status.id);
            let Some(log) = (is_running || is_left).then(|| Log::at(&status.log_path)).flatten() else { continue };
            let to_recover = is_left && self.may_recover(&status.id, &log);
            if is_running || to_recover {
                containers.push(Container { id: status.id.clone(), log, is_running, to_recover });
            }
        }
        containers
    }

    /// Not before the pause after a failure has ended, nor during a rotation, whose files are no leftovers.
    fn may_recover(&self, id: &ContainerId, log: &Log) -> bool {
        let is_early = || self.parts.retries.due(Operation::RecoverLog, &target_of(log)).is_some();
        !self.in_progress.values().any(|other| other.id == *id) && !is_early()
    }

    fn ended(&mut self, ended: Result<(task::Id, Done), task::JoinError>) {
        let (id, done) = match ended {
            Ok((id, done)) => (id, Some(done)),
            // A panic, which was reported.
            Err(error) => (error.id(), None),
        };
        self.check.take_if(|check| *check == id);
        let rotated = self.in_progress.remove(&id);
        match done {
            Some(Done::Checked(examined)) => examined.into_iter().for_each(|log| self.examined(log)),
            Some(Done::Rotated(result)) => {
                if let Some(container) = rotated {
                    self.report(&container, result);
                }
            }
            None => {}
        }
    }

    fn examined(&mut self, Examined { container, recovered, due }: Examined) {
        let retries = &self.parts.retries;
        match recovered {
            Some(Ok(())) => {
                retries.succeeded(Operation::RecoverLog, &target_of(&container.log));
                self.recovered.insert(container.id.clone());
            }
            Some(Err(error)) => {
                retries.failed(Operation::RecoverLog, &target_of(&container.log), &error.to_string());
            }
            None => {}
        }
        if let Some(due) = due {
            self.begin(container, due);
        }
    }

    fn begin(&mut self, container: Container, due: Due) {
        let Parts { policy, runtime, local_time, retries, .. } = &self.parts;
        let is_early = retries.due(Operation::RotateLog, &target_of(&container.log)).is_some();
        if is_early || self.in_progress.values().any(|other| other.id == container.id) {
            return;
        }
        let (runtime, policy, local_time) = (runtime.clone(), *policy, *local_time);
        let (workers, ends, rotated) = (self.workers.clone(), self.ends.clone(), container.clone());
        let task = self.tasks.spawn(async move {
            // The semaphore is never closed.
            let _worker = workers.acquire_owned().await;
            Done::Rotated(match due {
                Due::Rotate => rotate(&runtime, &rotated, policy, local_time(), ends).await,
                Due::Reopen => runtime.reopen_container_log(rotated.id.as_str()).await.map_err(RotationError::from),
            })
        });
        self.in_progress.insert(task.id(), container);
    }

    fn report(&self, container: &Container, result: Result<(), RotationError>) {
        let (retries, target) = (&self.parts.retries, target_of(&container.log));
        match result {
            Ok(()) => {
                retries.succeeded(Operation::RotateLog, &target);
                tracing::debug!(container = %container.id, log = target, "log rotated");
            }
            Err(error) => {
                retries.failed(Operation::RotateLog, &target, &error.to_string());
            }
        }
    }
}

/// The name of a log in reports of failed rotations.
fn target_of(log: &Log) -> String {
    log.path().display().to_string()
}

/// What is due for a log, after what an earlier agent left behind was removed. Blocks.
fn examine(container: Container, max_size: u64) -> Examined {
    let Container { ref log, is_running, to_recover, .. } = container;
    let recovered = to_recover.then(|| log.recover(!is_running));
    let due = match is_running.then(|| log.find()) {
        Some(found) if is_too_large(found, max_size) => Some(Due::Rotate),
        Some(Found::Missing) => Some(Due::Reopen),
        Some(Found::File(_) | Found::Other) | None => None,
    };
    Examined { container, recovered, due }
}

fn is_too_large(found: Found, max_size: u64) -> bool {
    matches!(found, Found::File(size) if size >= max_size)
}

/// Rotates one log, if it is still too large.
async fn rotate(
    runtime: &Runtime,
    container: &Container,
    policy: Policy,
    now: DateTime,
    ends: CancellationToken,
) -> Result<(), RotationError> {
    let renamed = blocking(&container.log, move |log| {
        // It may have been rotated since it was examined: by a rotation that was in progress then, or while this one waited
        // for a worker.
        if !is_too_large(log.find(), policy.max_size) {
            return Ok(None);
        }
        let name = log.make_room(policy.max_files, now, &ends)?;
        log.rename_to(&name)?;
        Ok(Some(name))
    });
    let Some(name) = renamed.await? else { return Ok(()) };
    let Err(reopen) = runtime.reopen_container_log(container.id.as_str()).await else { return Ok(()) };
    match blocking(&container.log, move |log| log.rename_back(&name)).await {
        Ok(()) => Err(reopen.into()),
        Err(rename) => Err(RotationError::RenameBack { reopen, rename: Box::new(rename) }),
    }
}

/// Runs file operations on a thread that may block. Once begun, they are carried out even if the future is dropped.
async fn blocking<T: Send + 'static>(
    log: &Log,
    work: impl FnOnce(&Log) -> Result<T, RotationError> + Send + 'static,
) -> Result<T, RotationError> {
    let (log, path) = (log.clone(), log.path());
    let done = task::spawn_blocking(move || work(&log)).await;
    done.unwrap_or_else(|error| Err(RotationError::File { attempt: "work on", path, source: io::Error::other(error) }))
}
