//! The pods that can be evicted, and their termination through the sync loop.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::model::Pod;
use crate::model::pod_ref;
use crate::status::TerminationReason;
use crate::sync::KillRequest;
use crate::workers::act::blocking_kill_limit;
use crate::workers::registry::WorkerRegistry;
use crate::workers::state::KillOptions;
use crate::workers::state::Phase;

/// How long the release of an evicted pod's resources is waited for, beyond the end of its containers.
const RELEASE: Duration = Duration::from_secs(30);

/// The pods of the node.
#[derive(Clone, Debug)]
pub struct NodePods {
    /// Pods with a worker.
    pub registry: WorkerRegistry,
    /// Requests to terminate a pod.
    pub kills: mpsc::Sender<KillRequest>,
}

impl NodePods {
    /// Pods whose containers may run, in no order.
    pub(super) fn active(&self) -> Vec<Pod> {
        let all = self.registry.summaries().into_values();
        all.filter(|worker| worker.phase < Phase::Terminated).filter_map(|worker| worker.pod).collect()
    }

    /// Terminates a pod and waits until nothing is left of it, or for so long that waiting longer serves no one.
    pub(super) async fn evict(&self, pod: &Pod, grace: i64, reason: TerminationReason) {
        let finished = CancellationToken::new();
        let options = KillOptions {
            grace: Some(grace),
            evicted: true,
            termination_reason: Some(Arc::new(reason)),
            finished: Some(finished.clone()),
        };
        let request = KillRequest { uid: pod_ref(pod).uid, options };
        if self.kills.send(request).await.is_err() {
            return;
        }
        let limit = blocking_kill_limit(grace) + RELEASE;
        if tokio::time::timeout(limit, finished.cancelled()).await.is_err() {
            tracing::warn!(pod = %pod_ref(pod).full_name(), ?limit, "an evicted pod does not end");
        }
    }
}
