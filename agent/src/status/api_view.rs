//! What the API server has of this node's pods, shared by the status cache and the status manager.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::watch;

use crate::model::Pod;
use crate::model::PodUid;
use crate::pleg::DirtyPods;

/// The API server's copies of this node's pods, from the watch.
pub trait ApiCopies: Send + Sync + 'static {
    /// The API object of the pod with this UID: the pod itself, or the mirror pod of a static pod. `None` while there is
    /// none. A mirror pod is found until it is deleted, even if its static pod was removed first.
    fn api_copy(&self, uid: &PodUid) -> Option<Pod>;
}

/// API copies of pods, and the pods whose status or copy changed since the status manager last read them.
pub struct ApiStatusView {
    /// Copies from the watch.
    pub copies: Arc<dyn ApiCopies>,
    /// Changed pods; one reader.
    pub changes: DirtyPods,
    /// The newest version of each pod's status that the API server has.
    sent: watch::Sender<HashMap<PodUid, u64>>,
}

impl ApiStatusView {
    pub(super) fn new(copies: Arc<dyn ApiCopies>) -> Self {
        Self { copies, changes: DirtyPods::default(), sent: watch::Sender::default() }
    }

    /// The API server has this version of the pod's status.
    pub(super) fn set_sent(&self, uid: &PodUid, version: u64) {
        let changes = |sent: &mut HashMap<PodUid, u64>| sent.insert(uid.clone(), version) != Some(version);
        self.sent.send_if_modified(changes);
    }

    /// Drops what was sent of pods that are not `known`.
    pub(super) fn retain_sent(&self, known: impl Fn(&PodUid) -> bool) {
        self.sent.send_if_modified(|sent| {
            sent.retain(|uid, _| known(uid));
            false
        });
    }

    /// Waits until the API server has this version of the pod's status, or a newer one. Dropping the future has no effect.
    pub(super) async fn sent(&self, uid: &PodUid, version: u64) {
        let is_sent = |sent: &HashMap<PodUid, u64>| sent.get(uid).is_some_and(|sent| *sent >= version);
        // The sender is alive as long as `self`: there is no error.
        let _ = self.sent.subscribe().wait_for(is_sent).await;
    }
}
