//! Pods bound to this node, watched at the API server. While the server is unreachable the last known pods stay
//! desired.
//!
//! Every complete list is sent as a set; watch events between lists are sent as changes, so that the cost of an event
//! does not depend on the number of pods. What is received before the Node is known is sent when it is.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::Api;
use kube::runtime::watcher::Config;
use tokio::sync::mpsc;
use tokio::sync::watch::Receiver;
use tokio_util::sync::CancellationToken;

use super::ApiPods;
use super::SourceUpdate;
use crate::admission::path_safety;
use crate::apiserver::watch;
use crate::apiserver::watch::Event;
use crate::model::ConfigSource;
use crate::model::Pod;

/// Most changes sent in one update.
const BATCH: usize = 256;

/// Settings of the API source.
pub(super) struct ApiSource {
    /// Access to the pods.
    pub pods: ApiPods,
    /// This node's name.
    pub node_name: String,
}

impl ApiSource {
    /// Sends updates until cancelled or until the receiver is dropped.
    pub(super) async fn run(self, updates: mpsc::Sender<(ConfigSource, SourceUpdate)>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = self.follow(updates) => {}
        }
    }

    async fn follow(self, updates: mpsc::Sender<(ConfigSource, SourceUpdate)>) {
        let ApiPods { client, recovered, mut node_known } = self.pods;
        let pods: Api<ApiPod> = Api::all(client);
        let mine = Config::default().fields(&format!("spec.nodeName={}", self.node_name));
        // Batches the events that arrive while the merger is busy.
        let events = watch::follow_pods(pods, mine, recovered).ready_chunks(BATCH);
        let mut events = std::pin::pin!(events);
        let mut pending = PendingChanges::default();
        let mut is_held = true;
        loop {
            tokio::select! {
                batch = events.next() => match batch {
                    Some(batch) => batch.into_iter().for_each(|event| pending.take(event)),
                    None => return,
                },
                () = until_true(&mut node_known), if is_held => is_held = false,
            }
            if is_held {
                continue;
            }
            for update in pending.drain() {
                if updates.send((ConfigSource::Api, update)).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Never returns if that cannot become true any more, as the agent ends.
async fn until_true(state: &mut Receiver<bool>) {
    let is_true = state.wait_for(|is_true| *is_true).await.is_ok();
    if !is_true {
        std::future::pending().await
    }
}

/// Watch events that were not sent yet. Pure.
#[derive(Default)]
struct PendingChanges {
    /// An incomplete list.
    list: Option<Vec<Pod>>,
    /// UIDs of its pods that cannot be decoded.
    kept: Vec<String>,
    /// A complete list that was not sent yet.
    set: Option<SourceUpdate>,
    /// Events after that list, by UID: the newest object, or `None` for a deleted one.
    changes: HashMap<String, Option<Pod>>,
    /// UIDs in `changes` in the order of their first appearance.
    order: Vec<String>,
}

impl PendingChanges {
    fn take(&mut self, event: Event<ApiPod>) {
        match event {
            Event::Init => {
                self.list = Some(Vec::new());
                self.kept.clear();
            }
            Event::InitApply(pod) => self.list.get_or_insert_default().extend(accept(pod)),
            // One that was deleted ends, although it cannot be said how long it may take.
            Event::InitKeep(pod) if pod.deletion_timestamp.is_none() => self.kept.push(pod.uid),
            Event::InitKeep(_) => {}
            Event::InitDone => {
                let kept = std::mem::take(&mut self.kept);
                // The list includes every earlier event, but of the pods that it keeps.
                self.changes.retain(|uid, _| kept.contains(uid));
                self.order.retain(|uid| kept.contains(uid));
                self.set = self.list.take().map(|pods| SourceUpdate::List { pods, kept });
            }
            Event::Apply(pod) => {
                if let Some(pod) = accept(pod) {
                    let uid = pod.metadata.uid.clone().unwrap_or_default();
                    self.change(uid, Some(pod));
                }
            }
            Event::Delete(pod) => self.change(pod.uid, None),
        }
    }

    fn change(&mut self, uid: String, pod: Option<Pod>) {
        if self.changes.insert(uid.clone(), pod).is_none() {
            self.order.push(uid);
        }
    }

    /// Takes the unsent updates, oldest first.
    fn drain(&mut self) -> Vec<SourceUpdate> {
        let mut updates: Vec<SourceUpdate> = self.set.take().into_iter().collect();
        let mut changes = std::mem::take(&mut self.changes);
        let (mut changed, mut removed) = (Vec::new(), Vec::new());
        for uid in std::mem::take(&mut self.order) {
            match changes.remove(&uid) {
                Some(Some(pod)) => changed.push(pod),
                Some(None) => removed.push(uid),
                None => {}
            }
        }
        if !changed.is_empty() || !removed.is_empty() {
            updates.push(SourceUpdate::Change { changed, removed });
        }
        updates
    }
}

/// The pod as it is kept; `None` if its UID, name or namespace is not a path component, since then it can be neither run
/// nor reported.
fn accept(mut pod: ApiPod) -> Option<Pod> {
    if let Some(problem) = path_safety::identity(&pod.metadata) {
        tracing::error!(source = "api", "pod ignored: {problem}");
        return None;
    }
    // Half the size of many pods, and unused here.
    pod.metadata.managed_fields = None;
    Some(Arc::new(pod))
}

#[cfg(test)]
#[path = "api_tests.rs"]
mod tests;
