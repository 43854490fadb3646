//! Removes from a node that is short of disk space what no pod needs.

use std::sync::Arc;
use std::time::Duration;

use crate::eviction::Garbage;
use crate::images::ImageGc;
use crate::workers::act::gc;
use crate::workers::registry::WorkerRegistry;
use crate::workers::state::Phase;
use crate::workers::worker::WorkerContext;

/// Dead containers and unused images of the pipeline's runtime.
#[derive(Clone)]
pub struct NodeGarbage {
    context: Arc<WorkerContext>,
    registry: WorkerRegistry,
    images: Arc<ImageGc>,
}

impl NodeGarbage {
    /// Of the runtime of these workers.
    pub(super) fn new(context: Arc<WorkerContext>, registry: WorkerRegistry, images: Arc<ImageGc>) -> Self {
        Self { context, registry, images }
    }
}

impl Garbage for NodeGarbage {
    /// Only of pods whose worker has finished: it acts no more, so nothing else removes them at the same time.
    async fn remove_dead_containers(&self) {
        let finished = self.registry.summaries().into_iter().filter(|(_, worker)| worker.phase == Phase::Finished);
        for (uid, _) in finished {
            let Some(snapshot) = self.context.pleg.cached(&uid).filter(|snapshot| !snapshot.containers.is_empty())
            else {
                continue;
            };
            for error in gc::remove_dead(&self.context.act, &snapshot).await {
                tracing::warn!(pod_uid = uid.as_str(), %error, "cannot remove a dead container");
            }
            // The cache then shows them as removed; a failure is corrected by the next relist.
            let _ = self.context.pleg.inspect(&uid).await;
        }
    }

    async fn remove_unused_images(&self, min_age: Duration) {
        match self.images.remove_unused(min_age).await {
            Ok(removed) => tracing::info!(count = removed.count, bytes = removed.bytes, "unused images were removed"),
            Err(error) => tracing::warn!(%error, "cannot remove all unused images"),
        }
    }
}
