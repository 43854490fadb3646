//! Handle for other modules: reads the pod cache, requests inspections.

use std::collections::HashMap;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::RwLock;

use thiserror::Error;
use tokio::sync::mpsc;
use tokio::sync::oneshot;

use super::DirtyPods;
use super::TerminationMessages;
use super::termination::MessageReader;
use super::uninspected::Uninspected;
use crate::model::ContainerId;
use crate::model::PodSnapshot;
use crate::model::PodUid;

/// The published snapshots. Only the PLEG task writes.
pub(super) type Published = Arc<RwLock<HashMap<PodUid, Arc<PodSnapshot>>>>;

/// Commands queued for the task.
pub(super) const COMMAND_CAPACITY: usize = 1024;

/// A pod was not inspected.
#[derive(Clone, Debug, Error)]
pub enum InspectError {
    /// The runtime failed.
    #[error("inspecting pod {uid}: {message}")]
    Runtime {
        /// The pod.
        uid: PodUid,
        /// The runtime's error.
        message: Arc<str>,
    },
    /// The agent is shutting down.
    #[error("the PLEG has stopped")]
    Stopped,
}

pub(super) type Reply = oneshot::Sender<Result<Arc<PodSnapshot>, InspectError>>;

pub(super) enum Command {
    /// Any snapshot taken since the agent started.
    View(PodUid, Reply),
    /// A snapshot sampled from now on; these containers were just started or changed.
    Inspect(PodUid, Vec<ContainerId>, Reply),
    /// The pod's worker begins to act and will request an inspection afterwards.
    Acting(PodUid),
    /// The cache shows this container as exited.
    Exit(PodUid, ContainerId, oneshot::Sender<()>),
}

/// Reads the pod cache and requests inspections. Cheap to clone.
#[derive(Clone)]
pub struct PlegHandle {
    pub(super) published: Published,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) dirty: DirtyPods,
    pub(super) messages: MessageReader,
    pub(super) uninspected: Uninspected,
}

impl fmt::Debug for PlegHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlegHandle").finish_non_exhaustive()
    }
}

impl PlegHandle {
    /// The cached snapshot, without waiting. `None` does not mean that the runtime has nothing of the pod.
    pub fn cached(&self, uid: &PodUid) -> Option<Arc<PodSnapshot>> {
        self.published.read().unwrap_or_else(PoisonError::into_inner).get(uid).cloned()
    }

    /// Reads the termination messages of one pod.
    pub fn termination_messages(&self) -> TerminationMessages {
        TerminationMessages::new(self.messages.clone())
    }

    /// All cached snapshots, in no order.
    pub fn all(&self) -> Vec<Arc<PodSnapshot>> {
        self.published.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Pods that the runtime has and that are not cached yet; `None` if it is not known which pods it has: before the first
    /// relist, and after one that failed. To be read before the cache, so that a pod that is cached meanwhile is in one of
    /// them.
    pub fn uninspected(&self) -> Option<HashSet<PodUid>> {
        self.uninspected.pods()
    }

    /// Waits until [`Self::uninspected`] has become known, or has nothing left. For one reader. Cancel-safe.
    pub async fn pods_inspected(&self) {
        self.uninspected.resolved().await;
    }

    /// The cached snapshot, or an empty one if a relist did not contain the pod. Waits for the first relist. For a worker
    /// that has not acted yet.
    ///
    /// # Errors
    /// The runtime returned an error, or the PLEG has stopped.
    pub async fn view(&self, uid: &PodUid) -> Result<Arc<PodSnapshot>, InspectError> {
        if let Some(snapshot) = self.cached(uid) {
            return Ok(snapshot);
        }
        self.ask(|reply| Command::View(uid.clone(), reply)).await
    }

    /// A snapshot sampled after this call.
    ///
    /// # Errors
    /// The runtime returned an error, or the PLEG has stopped.
    pub async fn inspect(&self, uid: &PodUid) -> Result<Arc<PodSnapshot>, InspectError> {
        self.inspect_with(uid, Vec::new()).await
    }

    /// [`Self::inspect`] for a worker that has just started or changed `fresh`: their statuses are requested beside the lists.
    ///
    /// # Errors
    /// The runtime returned an error, or the PLEG has stopped.
    pub async fn inspect_with(&self, uid: &PodUid, fresh: Vec<ContainerId>) -> Result<Arc<PodSnapshot>, InspectError> {
        self.ask(|reply| Command::Inspect(uid.clone(), fresh, reply)).await
    }

    /// The pod's worker is about to act and will request an inspection afterwards: until then hints about this pod cause
    /// no inspection.
    pub async fn acting(&self, uid: &PodUid) {
        // Fails only after the PLEG has stopped.
        let _ = self.commands.send(Command::Acting(uid.clone())).await;
    }

    /// Waits until the cache shows a container of the pod as exited, reported by the runtime or proven by the kernel. Never
    /// returns for a container whose exit does not become known, or once the PLEG has stopped. Cancel-safe.
    pub async fn exit_of(&self, uid: &PodUid, id: &ContainerId) {
        let (sender, exited) = oneshot::channel();
        let sent = self.commands.send(Command::Exit(uid.clone(), id.clone(), sender)).await;
        if sent.is_err() || exited.await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Waits for changed pods and takes them. Cancel-safe.
    pub async fn changed_pods(&self) -> Vec<PodUid> {
        self.dirty.take().await
    }

    async fn ask(&self, command: impl FnOnce(Reply) -> Command) -> Result<Arc<PodSnapshot>, InspectError> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.map_err(|_| InspectError::Stopped)?;
        answer.await.map_err(|_| InspectError::Stopped)?
    }
}
