//! Mirror pods: the API's copies of static pods, made and unmade here. They show what the node runs, and decide nothing.
//!
//! Level-triggered by full name: the sync loop says what is wanted, the difference to the mirror known from the API
//! becomes one call at a time. Nothing is done without an API server, or before the own Node is known.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::time::DelayQueue;

use super::pods::is_mirror_of;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::pod_ref;
use crate::model::spec;
use crate::sources::static_pod::CONFIG_HASH;
use crate::sources::static_pod::CONFIG_MIRROR;
use crate::status::manager::PodApi;
use crate::status::manager::PodApiError;
use crate::status::manager::retry_after;

/// A mirror that was made but is not shown by the watch after this time may be gone again.
const SHOWN_LIMIT: Duration = Duration::from_secs(10);

/// What is wanted of a full name's mirror.
#[derive(Clone, Debug)]
pub enum Wish {
    /// It shall show this static pod.
    Show(Pod),
    /// It may stay and is not made anew: its static pod is ending, or has ended.
    Leave,
    /// There is no such static pod.
    Gone,
}

/// The mirror pods of this node. Owned by the sync loop.
pub struct Mirrors {
    api: Option<Arc<dyn PodApi>>,
    node: watch::Receiver<Option<Arc<Node>>>,
    names: HashMap<String, Name>,
    calls: JoinSet<(String, Due, Result<Option<ApiPod>, PodApiError>)>,
    timers: DelayQueue<String>,
}

/// What is known of one full name beyond what the watch shows.
#[derive(Debug, Default)]
struct Name {
    busy: bool,
    /// To be looked at again when a timer fires, not before.
    waits: bool,
    failures: u32,
    /// Made by us and not yet shown.
    made: Option<ApiPod>,
    /// Deleted by us and perhaps still shown.
    deleted: Option<PodRef>,
}

/// One call, or none.
#[derive(Clone, Debug, PartialEq)]
enum Due {
    Nothing,
    Create(Box<ApiPod>),
    Delete(PodRef),
}

impl Mirrors {
    /// Through these calls, owned by this Node.
    pub fn new(api: Arc<dyn PodApi>, node: watch::Receiver<Option<Arc<Node>>>) -> Self {
        Self { api: Some(api), ..Self::idle(node) }
    }

    /// None at all: there is no API server.
    pub fn none() -> Self {
        Self::idle(watch::channel(None).1)
    }

    fn idle(node: watch::Receiver<Option<Arc<Node>>>) -> Self {
        Self { api: None, node, names: HashMap::new(), calls: JoinSet::new(), timers: DelayQueue::new() }
    }

    /// Takes the next step from the mirror the watch shows to what is wanted, unless one is under way.
    pub fn keep(&mut self, full_name: &str, wish: &Wish, shown: Option<&Pod>) {
        let Some(api) = self.api.clone() else { return };
        let Some(node) = self.node.borrow().clone() else { return };
        let name = self.names.entry(full_name.to_owned()).or_default();
        if name.busy || name.waits {
            return;
        }
        let due = due(wish, name.present(shown.map(|pod| &**pod)), &node);
        if due == Due::Nothing {
            if name.is_forgettable() {
                self.names.remove(full_name);
            }
            return;
        }
        name.busy = true;
        let full_name = full_name.to_owned();
        self.calls.spawn(async move {
            let result = match &due {
                Due::Nothing => Ok(None),
                Due::Create(pod) => api.create(pod).await.map(Some),
                Due::Delete(pod) => api.delete(pod).await.map(|()| None),
            };
            (full_name, due, result)
        });
    }

    /// The watch showed that this mirror pod is gone.
    pub fn vanished(&mut self, mirror: &ApiPod) {
        let reference = pod_ref(mirror);
        if let Some(name) = self.names.get_mut(&reference.full_name()) {
            name.made.take_if(|made| made.metadata.uid == mirror.metadata.uid);
            name.deleted.take_if(|deleted| *deleted == reference);
        }
    }

    /// Waits for a reason to look at mirror pods again: at one of this full name, or at all (`None`).
    pub async fn news(&mut self) -> Option<String> {
        loop {
            tokio::select! {
                Some(Ok((name, due, result))) = self.calls.join_next(), if !self.calls.is_empty() => {
                    self.answered(&name, &due, result);
                    return Some(name);
                }
                Some(due) = self.timers.next(), if !self.timers.is_empty() => {
                    let full_name = due.into_inner();
                    if let Some(name) = self.names.get_mut(&full_name) {
                        name.waits = false;
                        name.made = None;
                    }
                    return Some(full_name);
                }
                Ok(()) = self.node.changed() => return None,
                else => std::future::pending::<()>().await,
            }
        }
    }

    fn answered(&mut self, full_name: &str, due: &Due, result: Result<Option<ApiPod>, PodApiError>) {
        let Some(name) = self.names.get_mut(full_name) else { return };
        name.busy = false;
        match (due, result) {
            (_, Ok(Some(made))) => {
                tracing::info!(pod = full_name, "mirror pod created");
                name.failures = 0;
                name.made = Some(made);
                self.timers.insert(full_name.to_owned(), SHOWN_LIMIT);
            }
            (Due::Delete(gone), Ok(None) | Err(PodApiError::NotFound | PodApiError::Conflict(_))) => {
                tracing::info!(pod = full_name, "mirror pod deleted");
                name.failures = 0;
                name.made.take_if(|made| pod_ref(made) == *gone);
                name.deleted = Some(gone.clone());
            }
            (_, Ok(None)) => {}
            (_, Err(error)) => {
                name.failures = name.failures.saturating_add(1);
                name.waits = true;
                let wait = retry_after(name.failures, fastrand::f64());
                tracing::warn!(pod = full_name, %error, retry_in = ?wait, "mirror pod not made or deleted");
                self.timers.insert(full_name.to_owned(), wait);
            }
        }
    }
}

impl Name {
    /// The mirror as of our own last call, where the watch is behind.
    fn present<'a>(&'a self, shown: Option<&'a ApiPod>) -> Option<&'a ApiPod> {
        let outdated = |pod: &&ApiPod| self.deleted.as_ref() == Some(&pod_ref(pod));
        shown.filter(|pod| !outdated(pod)).or(self.made.as_ref())
    }

    fn is_forgettable(&self) -> bool {
        self.made.is_none() && self.deleted.is_none()
    }
}

fn due(wish: &Wish, mirror: Option<&ApiPod>, node: &Node) -> Due {
    match (wish, mirror) {
        (Wish::Show(pod), None) if node.metadata.deletion_timestamp.is_none() => {
            Due::Create(Box::new(mirror_pod(pod, node)))
        }
        (Wish::Show(pod), Some(mirror)) if is_mirror_of(mirror, pod) && !spec::deletion_requested(mirror) => {
            Due::Nothing
        }
        (Wish::Leave, Some(mirror)) if !spec::deletion_requested(mirror) => Due::Nothing,
        (_, Some(mirror)) => Due::Delete(pod_ref(mirror)),
        (_, None) => Due::Nothing,
    }
}

/// The copy of a static pod, owned by its Node so that it goes with it.
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
