//! The pods that can be evicted, and their termination through the sync loop.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::status::Statuses;
use crate::status::TerminationReason;
use crate::sync::EvictionSender;
use crate::sync::SharedPods;
use crate::workers::act::blocking_kill_limit;
use crate::workers::registry::WorkerRegistry;
use crate::workers::state::KillOptions;
use crate::workers::state::Phase;
use crate::workers::state::is_terminal;

/// How long the release of an evicted pod's resources is waited for, beyond the end of its containers.
const RELEASE: Duration = Duration::from_secs(30);

/// The pods of the node.
#[derive(Clone)]
pub struct NodePods {
    /// Pods with a worker.
    pub registry: WorkerRegistry,
    /// Eviction requests.
    pub evictions: EvictionSender,
    /// What the API server has of them.
    pub statuses: Statuses,
    /// All that are desired, also without a worker.
    pub desired: SharedPods,
}

impl NodePods {
    /// Pods whose containers may run, in no order.
    pub(super) fn active(&self) -> Vec<Pod> {
        let all = self.registry.summaries().into_values();
        all.filter(|worker| worker.phase < Phase::Terminated).filter_map(|worker| worker.pod).collect()
    }

    /// Every source has delivered its pods.
    pub(super) fn are_complete(&self) -> bool {
        self.desired.sources_ready()
    }

    /// The phase of the pod's worker; `None` without one.
    pub(super) fn phase(&self, uid: &PodUid) -> Option<Phase> {
        self.registry.phase(uid)
    }

    /// The API server has the end of the pod, or does not have the pod: the next agent does not start it. True without an
    /// API server.
    pub(super) fn is_end_reported(&self, uid: &PodUid) -> bool {
        let Some(api) = self.statuses.api_view() else { return true };
        api.copies.api_copy(uid).is_none_or(|copy| is_terminal(&copy))
    }

    /// Terminates a pod that has no worker as soon as it has one, before a container of it is started.
    pub(super) fn evict_on_creation(&self, uid: PodUid, grace: i64, reason: TerminationReason) {
        let reason = Some(Arc::new(reason));
        let options =
            KillOptions { grace: Some(grace), evicted: true, termination_reason: reason, ..KillOptions::default() };
        self.registry.terminate_on_creation(uid, options);
    }

    /// The pod is to be terminated as soon as it has a worker.
    pub(super) fn is_expected(&self, uid: &PodUid) -> bool {
        self.registry.is_terminated_on_creation(uid)
    }

    /// Takes back [`Self::evict_on_creation`].
    pub(super) fn expect_no_more(&self, uid: &PodUid) {
        self.registry.take_termination(uid);
    }

    /// Terminates a pod and waits until nothing is left of it, for a bounded time.
    pub(super) async fn evict(&self, pod: &Pod, grace: i64, reason: TerminationReason) {
        let finished = CancellationToken::new();
        if self.evictions.evict(pod_ref(pod).uid, reason, Some(grace), finished.clone()).await.is_err() {
            return;
        }
        let limit = blocking_kill_limit(grace) + RELEASE;
        if tokio::time::timeout(limit, finished.cancelled()).await.is_err() {
            tracing::warn!(pod = %pod_ref(pod).full_name(), ?limit, "an evicted pod has not terminated in time");
        }
    }
}
