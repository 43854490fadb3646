//! Eviction of pods in favour of a critical one, which starts when their processes have ended, as upstream. What they held is
//! free then: CPU and memory, ports, and what admission counts. Their volumes and cgroups are released beside that.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use tokio_util::sync::CancellationToken;

use super::EvictionSender;
use crate::admission::Candidate;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::status::TerminationReason;
use crate::workers::act::blocking_kill_limit;

const REASON: &str = "Preempting";
const MESSAGE: &str = "Preempted in order to admit critical pod";
/// Message of the victims' condition `DisruptionTarget` (KEP-3329).
const DISRUPTION: &str = "Pod was preempted by Kubelet to accommodate a critical pod.";

/// Records that a pod is to be preempted, and the grace period that it gets in seconds: a later agent ends it as well, unless
/// the API server has its end.
pub type RecordPreemption = Arc<dyn Fn(PodUid, i64) -> BoxFuture<'static, ()> + Send + Sync>;

/// For the status of a preempted pod.
pub fn preemption_reason() -> TerminationReason {
    TerminationReason { reason: REASON, message: MESSAGE.to_owned(), disruption: Some(DISRUPTION.to_owned()) }
}

/// Evicts the pods one after another, each with its own grace period, and waits for each for a bounded time. Returns how many
/// of them have ended.
pub(super) async fn evict(
    victims: Vec<Candidate>,
    evictions: EvictionSender,
    recorder: Recorder,
    record: RecordPreemption,
) -> usize {
    let mut ended = 0;
    for Candidate { pod, .. } in victims {
        tracing::info!(pod = %pod_ref(&pod), "preempting the pod in favour of a critical one");
        recorder.pod_event(&pod, "", EventType::Warning, REASON, MESSAGE);
        ended += usize::from(end(&pod, &evictions, &record).await);
    }
    ended
}

async fn end(pod: &Arc<Pod>, evictions: &EvictionSender, record: &RecordPreemption) -> bool {
    let (uid, stopped) = (pod_ref(pod).uid, CancellationToken::new());
    let grace = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds).unwrap_or(0);
    record(uid.clone(), grace).await;
    if evictions.preempt(uid, preemption_reason(), stopped.clone()).await.is_err() {
        return false;
    }
    let limit = blocking_kill_limit(grace);
    let has_ended = tokio::time::timeout(limit, stopped.cancelled()).await.is_ok();
    if !has_ended {
        tracing::warn!(pod = %pod_ref(pod), ?limit, "a preempted pod has not terminated in time");
    }
    has_ended
}
