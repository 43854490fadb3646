//! Mirror pods: the API objects that represent static pods. They influence no container.
//!
//! Level-triggered by full name: the difference between the desired mirror pod and the one known from the API becomes
//! one call at a time. Without an API server, and before the own Node is known, no call is made.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::time::DelayQueue;
use tokio_util::time::delay_queue;

use super::pods::is_mirror_of;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::pod_ref;
use crate::model::spec;
use crate::recorder::Recorder;
use crate::retry::Operation;
use crate::retry::RetryTracker;
use crate::sources::static_pod::CONFIG_HASH;
use crate::sources::static_pod::CONFIG_MIRROR;
use crate::status::manager::PodApi;
use crate::status::manager::PodApiError;
use crate::status::manager::retry_after;

/// A mirror pod that was created and does not appear in the watch within this time counts as deleted.
const SHOWN_LIMIT: Duration = Duration::from_secs(10);

/// What to do about the mirror pod of a full name.
#[derive(Clone, Debug)]
pub enum MirrorAction {
    /// Create it, or replace one that does not match this static pod.
    Ensure(Pod),
    /// Keep an existing one and create none: the static pod is terminating or has terminated.
    Keep,
    /// Delete it: there is no such static pod.
    Delete,
}

/// The mirror pods of this node. Owned by the sync loop.
pub struct Mirrors {
    api: Option<Arc<dyn PodApi>>,
    node: watch::Receiver<Option<Arc<Node>>>,
    names: HashMap<String, Name>,
    calls: JoinSet<(String, Call, Result<Option<ApiPod>, PodApiError>)>,
    timers: DelayQueue<String>,
    /// Calls that the API server does not accept.
    retries: RetryTracker,
}

/// State of one full name beyond the watch.
#[derive(Debug, Default)]
struct Name {
    busy: bool,
    /// The last call failed: nothing is done before the timer fires.
    backing_off: bool,
    failures: u32,
    /// Reason of the last failure without an answer, logged once.
    reason: String,
    /// Created by this agent and not in the watch yet.
    made: Option<ApiPod>,
    /// Deleted by this agent and possibly still in the watch.
    deleted: Option<PodRef>,
    /// The last one whose deletion the watch reported during a call.
    removed: Option<PodRef>,
    /// The end of a pause, or of the time in which one that was made has to appear.
    timer: Option<delay_queue::Key>,
}

/// One API call, or none.
#[derive(Clone, Debug, PartialEq)]
enum Call {
    Nothing,
    Create(Box<ApiPod>),
    Delete(PodRef),
}

impl Mirrors {
    /// Mirror pods managed through `api` and owned by `node`. Calls that the API server does not accept are reported to
    /// `retries`.
    pub fn new(api: Arc<dyn PodApi>, node: watch::Receiver<Option<Arc<Node>>>, retries: RetryTracker) -> Self {
        Self { api: Some(api), ..Self::idle(node, retries) }
    }

    /// Manages no mirror pods: there is no API server.
    pub fn none() -> Self {
        Self::idle(watch::channel(None).1, RetryTracker::new(Recorder::default(), None))
    }

    fn idle(node: watch::Receiver<Option<Arc<Node>>>, retries: RetryTracker) -> Self {
        Self { api: None, node, names: HashMap::new(), calls: JoinSet::new(), timers: DelayQueue::new(), retries }
    }

    /// Starts the next API call towards `action`, unless one is in flight or backing off. `shown` is the mirror pod in the
    /// watch.
    pub fn reconcile(&mut self, full_name: &str, action: &MirrorAction, shown: Option<&Pod>) {
        let Some(api) = self.api.clone() else { return };
        let Some(node) = self.node.borrow().clone() else { return };
        let name = self.names.entry(full_name.to_owned()).or_default();
        if name.busy || name.backing_off {
            return;
        }
        let due = next_call(action, name.present(shown.map(|pod| &**pod)), &node);
        if due == Call::Nothing {
            if name.is_forgettable() {
                self.forget(full_name);
            }
            return;
        }
        name.busy = true;
        let full_name = full_name.to_owned();
        self.calls.spawn(async move {
            let made = AssertUnwindSafe(make(&*api, &due)).catch_unwind().await;
            let result = made.unwrap_or_else(|_| Err(PodApiError::Unanswered("the client panicked".to_owned())));
            (full_name, due, result)
        });
    }

    fn forget(&mut self, full_name: &str) {
        let Some(name) = self.names.remove(full_name) else { return };
        if let Some(timer) = name.timer {
            self.timers.try_remove(&timer);
        }
        if name.failures > 0 {
            self.retries.succeeded(Operation::SyncMirrorPod, full_name);
        }
    }

    /// The watch reported that this mirror pod was deleted.
    pub fn removed(&mut self, mirror: &ApiPod) {
        let reference = pod_ref(mirror);
        if let Some(name) = self.names.get_mut(&reference.full_name()) {
            name.made.take_if(|made| made.metadata.uid == mirror.metadata.uid);
            name.deleted.take_if(|deleted| *deleted == reference);
            name.removed = Some(reference).filter(|_| name.busy);
        }
    }

    /// Waits until the mirror pod of this full name, or all of them (`None`), must be reconciled again. Cancel-safe.
    pub async fn changed(&mut self) -> Option<String> {
        loop {
            tokio::select! {
                Some(Ok((name, due, result))) = self.calls.join_next(), if !self.calls.is_empty() => {
                    self.on_call_result(&name, &due, result);
                    return Some(name);
                }
                Some(due) = self.timers.next(), if !self.timers.is_empty() => {
                    let full_name = due.into_inner();
                    if let Some(name) = self.names.get_mut(&full_name) {
                        name.backing_off = false;
                        name.made = None;
                        name.timer = None;
                    }
                    return Some(full_name);
                }
                Ok(()) = self.node.changed() => return None,
                else => std::future::pending::<()>().await,
            }
        }
    }

    fn on_call_result(&mut self, full_name: &str, due: &Call, result: Result<Option<ApiPod>, PodApiError>) {
        let Some(name) = self.names.get_mut(full_name) else { return };
        name.busy = false;
        let removed = name.removed.take();
        let wait = match (due, result) {
            (_, Ok(Some(made))) => {
                tracing::info!(pod = full_name, "mirror pod created");
                name.succeeded();
                self.retries.succeeded(Operation::SyncMirrorPod, full_name);
                name.made = Some(made);
                SHOWN_LIMIT
            }
            (Call::Delete(gone), Ok(None) | Err(PodApiError::NotFound | PodApiError::Conflict(_))) => {
                tracing::info!(pod = full_name, "mirror pod deleted");
                name.succeeded();
                self.retries.succeeded(Operation::SyncMirrorPod, full_name);
                name.made.take_if(|made| pod_ref(made) == *gone);
                name.deleted = Some(gone.clone()).filter(|gone| removed.as_ref() != Some(gone));
                return;
            }
            (_, Ok(None)) => return,
            (_, Err(error)) => {
                name.backing_off = true;
                let wait = name.failed(full_name, &error);
                if error.is_answer() {
                    let due = self.retries.failed(Operation::SyncMirrorPod, full_name, &error.to_string());
                    due.saturating_duration_since(Instant::now())
                } else {
                    wait
                }
            }
        };
        if let Some(replaced) = name.timer.replace(self.timers.insert(full_name.to_owned(), wait)) {
            self.timers.try_remove(&replaced);
        }
    }
}

impl Name {
    /// The mirror pod as of the last call, where the watch lags behind.
    fn present<'a>(&'a self, shown: Option<&'a ApiPod>) -> Option<&'a ApiPod> {
        let outdated = |pod: &&ApiPod| self.deleted.as_ref() == Some(&pod_ref(pod));
        shown.filter(|pod| !outdated(pod)).or(self.made.as_ref())
    }

    /// A call failed. Returns the pause after an outage, whose reasons are logged; what the API server has answered is
    /// reported by the caller.
    fn failed(&mut self, full_name: &str, error: &PodApiError) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let (wait, reason) = (retry_after(self.failures, fastrand::f64()), error.to_string());
        if !error.is_answer() && self.reason != reason {
            tracing::warn!(pod = full_name, reason, retry_in = ?wait, "cannot create or delete the mirror pod");
            self.reason = reason;
        }
        wait
    }

    fn succeeded(&mut self) {
        self.failures = 0;
        self.reason.clear();
    }

    fn is_forgettable(&self) -> bool {
        self.made.is_none() && self.deleted.is_none()
    }
}

async fn make(api: &dyn PodApi, call: &Call) -> Result<Option<ApiPod>, PodApiError> {
    match call {
        Call::Nothing => Ok(None),
        Call::Create(pod) => api.create(pod).await.map(Some),
        Call::Delete(pod) => api.delete(pod).await.map(|()| None),
    }
}

fn next_call(action: &MirrorAction, mirror: Option<&ApiPod>, node: &Node) -> Call {
    match (action, mirror) {
        (MirrorAction::Ensure(pod), None) if node.metadata.deletion_timestamp.is_none() => {
            Call::Create(Box::new(mirror_pod(pod, node)))
        }
        (MirrorAction::Ensure(pod), Some(mirror)) if is_mirror_of(mirror, pod) && !spec::deletion_requested(mirror) => {
            Call::Nothing
        }
        (MirrorAction::Keep, Some(mirror)) if !spec::deletion_requested(mirror) => Call::Nothing,
        (_, Some(mirror)) => Call::Delete(pod_ref(mirror)),
        (_, None) => Call::Nothing,
    }
}

/// The copy of a static pod, owned by its Node so that it is garbage-collected with it.
fn mirror_pod(pod: &ApiPod, node: &Node) -> ApiPod {
    let mut mirror = ApiPod { status: None, ..pod.clone() };
    let annotations = mirror.metadata.annotations.get_or_insert_default();
    let hash = annotations.get(CONFIG_HASH).cloned().unwrap_or_default();
    annotations.insert(CONFIG_MIRROR.to_owned(), hash);
    mirror.metadata.uid = None;
    mirror.metadata.resource_version = None;
    mirror.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.metadata.name.clone().unwrap_or_default(),
        uid: node.metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: None,
    }]);
    mirror
}

#[cfg(test)]
#[path = "mirrors_tests.rs"]
mod tests;
