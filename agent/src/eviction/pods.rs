//! The pods that can be evicted, and their termination through the sync loop.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::model::Pod;
use crate::model::pod_ref;
use crate::status::TerminationReason;
use crate::sync::EvictionSender;
use crate::workers::act::blocking_kill_limit;
use crate::workers::registry::WorkerRegistry;
use crate::workers::state::Phase;

/// How long the release of an evicted pod's resources is waited for, beyond the end of its containers.
const RELEASE: Duration = Duration::from_secs(30);

/// The pods of the node.
#[derive(Clone, Debug)]
pub struct NodePods {
    /// Pods with a worker.
    pub registry: WorkerRegistry,
    /// Eviction requests.
    pub evictions: EvictionSender,
}

impl NodePods {
    /// Pods whose containers may run, in no order.
    pub(super) fn active(&self) -> Vec<Pod> {
        let all = self.registry.summaries().into_values();
        all.filter(|worker| worker.phase < Phase::Terminated).filter_map(|worker| worker.pod).collect()
    }

    /// Terminates a pod and waits until nothing is left of it, for a bounded time.
    pub(super) async fn evict(&self, pod: &Pod, grace: i64, reason: TerminationReason) {
        let finished = CancellationToken::new();
        if self.evictions.evict(pod_ref(pod).uid, reason, Some(grace), finished.clone()).await.is_err() {
            return;
        }
        let limit = blocking_kill_limit(grace) + RELEASE;
        if tokio::time::timeout(limit, finished.cancelled()).await.is_err() {
            tracing::warn!(pod = %pod_ref(pod).full_name(), ?limit, "an evicted pod does not end");
        }
    }
}
