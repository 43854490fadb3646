//! What the API server has of this node's pods, shared by the status cache and the status manager.

use std::sync::Arc;

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
}

impl ApiStatusView {
    pub(super) fn new(copies: Arc<dyn ApiCopies>) -> Self {
        Self { copies, changes: DirtyPods::default() }
    }
}
