//! The API server's side of statuses, as the board and the status manager share it.

use std::sync::Arc;

use crate::model::Pod;
use crate::model::PodUid;
use crate::pleg::DirtyPods;

/// The API's copies of this node's pods, as the watch last brought them.
pub trait ApiCopies: Send + Sync + 'static {
    /// The object that stands for the pod with this UID at the API server: the pod itself, or the mirror of a static pod.
    /// `None` while there is none. A mirror is found until it is gone, even if its static pod went first.
    fn api_copy(&self, uid: &PodUid) -> Option<Pod>;
}

/// Copies, and the pods whose status or copy has changed since the manager last looked.
pub struct ApiSide {
    /// What the API says.
    pub copies: Arc<dyn ApiCopies>,
    /// Pods with news; one reader.
    pub changes: DirtyPods,
}

impl ApiSide {
    pub(super) fn new(copies: Arc<dyn ApiCopies>) -> Self {
        Self { copies, changes: DirtyPods::default() }
    }
}
