//! Removes from a node that is short of disk space what no pod needs.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::eviction::Garbage;
use crate::images::ImageGc;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::retry::Operation;
use crate::workers::act::gc;
use crate::workers::act::joined;
use crate::workers::registry::WorkerRegistry;
use crate::workers::state::Phase;
use crate::workers::worker::WorkerContext;

/// The target of failed removals of images.
const IMAGES: &str = "unused images";

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

    /// Pods whose worker has finished and that have containers, by the target of failures.
    fn finished(&self) -> HashMap<String, Arc<PodSnapshot>> {
        let workers = self.registry.summaries().into_iter().filter(|(_, worker)| worker.phase == Phase::Finished);
        let snapshot = |uid: PodUid| self.context.pleg.cached(&uid).filter(|snapshot| !snapshot.containers.is_empty());
        workers.filter_map(|(uid, _)| snapshot(uid)).map(|snapshot| (snapshot.pod.with_uid(), snapshot)).collect()
    }
}

impl Garbage for NodeGarbage {
    /// Only of pods whose worker has finished: it acts no more, so nothing else removes them at the same time.
    async fn remove_dead_containers(&self) {
        let pods = self.finished();
        let retries = &self.context.retries;
        retries.keep_only(Operation::ReclaimDisk, |target| target == IMAGES || pods.contains_key(target));
        for (target, snapshot) in pods {
            let errors = gc::remove_dead(&self.context.act, &snapshot).await;
            if errors.is_empty() {
                retries.succeeded(Operation::ReclaimDisk, &target);
            } else {
                retries.failed(Operation::ReclaimDisk, &target, &joined(&errors));
            }
            // The cache then shows them as removed; a failure is corrected by the next relist.
            let _ = self.context.pleg.inspect(&snapshot.pod.uid).await;
        }
    }

    async fn remove_unused_images(&self, min_age: Duration) {
        match self.images.remove_unused(min_age).await {
            Ok(removed) => {
                self.context.retries.succeeded(Operation::ReclaimDisk, IMAGES);
                tracing::info!(count = removed.count, bytes = removed.bytes, "unused images were removed");
            }
            Err(error) => {
                self.context.retries.failed(Operation::ReclaimDisk, IMAGES, &error.to_string());
            }
        }
    }

    /// Failures in the next shortage are not those of one operation that is stuck since then.
    fn is_not_needed(&self) {
        self.context.retries.keep_only(Operation::ReclaimDisk, |_| false);
    }
}
