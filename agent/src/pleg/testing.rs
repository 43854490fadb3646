//! Small snapshots for tests.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::DirtyPods;
use super::PlegHandle;
use super::handle::Published;
use super::termination::MessageReader;
use super::uninspected::Uninspected;
use crate::model::ContainerId;
use crate::model::ContainerResources;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodRef;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::SandboxId;
use crate::model::TerminationFile;

/// A handle to a cache without pods, which never changes.
pub(crate) fn idle_handle() -> PlegHandle {
    PlegHandle {
        published: Published::default(),
        commands: mpsc::channel(1).0,
        dirty: DirtyPods::default(),
        messages: MessageReader::default(),
        uninspected: Uninspected::default(),
    }
}

/// The same, with pods that a test marks as changed.
pub(crate) fn changing_handle(dirty: DirtyPods) -> PlegHandle {
    PlegHandle { dirty, ..idle_handle() }
}

/// Puts a snapshot into the cache.
pub(crate) fn publish(handle: &PlegHandle, snapshot: PodSnapshot) {
    let mut published = handle.published.write().expect("no writer has panicked");
    published.insert(snapshot.pod.uid.clone(), Arc::new(snapshot));
}

pub(crate) fn pod(uid: &str) -> PodRef {
    PodRef { uid: PodUid::from(uid), namespace: "default".into(), name: uid.into() }
}

pub(crate) fn snapshot(sampled_at: Instant, containers: Vec<ContainerStatus>) -> PodSnapshot {
    PodSnapshot { containers, ..PodSnapshot::empty(pod("p"), sampled_at) }
}

pub(crate) fn container(id: &str, name: &str, state: ContainerState) -> ContainerStatus {
    ContainerStatus {
        id: ContainerId::from(id),
        sandbox_id: SandboxId::from("s"),
        name: name.to_owned(),
        attempt: 0,
        state,
        created_at: 1,
        started_at: 2,
        finished_at: 0,
        exit_code: (state == ContainerState::Exited).then_some(0),
        reason: String::new(),
        message: String::new(),
        image: String::new(),
        image_ref: String::new(),
        hash: 0,
        restart_count: 0,
        user: None,
        stop_signal: None,
        resources: ContainerResources::default(),
        log_path: String::new(),
        termination: TerminationFile::default(),
        pid: Some(4711),
        proven: None,
        exit_observed: false,
    }
}
