//! Requests of other modules to the sync loop: terminate a pod; reject new pods while the machine shuts down or is
//! under pressure.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::model::Pod;
use crate::model::PodUid;
use crate::model::Pressures;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::status::TerminationReason;
use crate::workers::act::blocking_kill_limit;
use crate::workers::state::KillOptions;

/// Capacity of the channel of kill requests.
pub const KILL_CAPACITY: usize = 256;

/// Terminate a pod although its source desires it.
#[derive(Debug)]
pub struct KillRequest {
    /// The pod. An unknown one counts as terminated.
    pub uid: PodUid,
    /// Grace period and reason.
    pub options: KillOptions,
}

/// Sends eviction requests to the workers of pods.
#[derive(Clone, Debug)]
pub struct EvictionSender(mpsc::Sender<KillRequest>);

/// The sync loop has ended; nothing is evicted any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the sync loop has stopped")]
pub struct SyncLoopStopped;

impl EvictionSender {
    /// A sender to the sync loop that receives these requests.
    pub fn new(kills: mpsc::Sender<KillRequest>) -> Self {
        Self(kills)
    }

    /// Requests the eviction of a pod: its containers get `grace` seconds instead of the pod's own period, its status says
    /// Failed for this reason, and what is left of its containers is removed. `finished` is cancelled when nothing is left to
    /// do for the pod; at once for an unknown one. A pod that is terminated for another reason already keeps that.
    ///
    /// # Errors
    /// The sync loop has ended.
    pub async fn evict(
        &self,
        uid: PodUid,
        reason: TerminationReason,
        grace: Option<i64>,
        finished: CancellationToken,
    ) -> Result<(), SyncLoopStopped> {
        let termination_reason = Some(Arc::new(reason));
        let options = KillOptions { grace, evicted: true, termination_reason, stopped: None, finished: Some(finished) };
        self.send(uid, options).await
    }

    /// Requests the eviction of a pod with its own grace period. `stopped` is cancelled when no process of it runs, which is
    /// before its volumes and its cgroup are released. Otherwise as [`Self::evict`].
    ///
    /// # Errors
    /// The sync loop has ended.
    pub(super) async fn preempt(
        &self,
        uid: PodUid,
        reason: TerminationReason,
        stopped: CancellationToken,
    ) -> Result<(), SyncLoopStopped> {
        let (termination_reason, stopped) = (Some(Arc::new(reason)), Some(stopped));
        self.send(uid, KillOptions { evicted: true, termination_reason, stopped, ..KillOptions::default() }).await
    }

    async fn send(&self, uid: PodUid, options: KillOptions) -> Result<(), SyncLoopStopped> {
        self.0.send(KillRequest { uid, options }).await.map_err(|_| SyncLoopStopped)
    }
}

/// Receivers of the requests.
#[derive(Debug)]
pub struct SyncRequests {
    /// Pods to terminate.
    pub kills: mpsc::Receiver<KillRequest>,
    /// True while the machine shuts down: new pods are rejected.
    pub closed: watch::Receiver<bool>,
    /// Resources of the node under pressure: some new pods are rejected.
    pub pressures: watch::Receiver<Pressures>,
}

/// Records the event ExceededGracePeriod if processes of a pod whose end is waited for outlast max(10 s, 1.5 x grace period).
pub(super) fn bound_grace_period(pod: &Pod, options: &mut KillOptions, recorder: &Recorder) {
    if options.stopped.is_none() && options.finished.is_none() {
        return;
    }
    let stopped = options.stopped.get_or_insert_default().clone();
    let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let limit = blocking_kill_limit(options.grace.or(own).unwrap_or(0));
    let (pod, recorder) = (pod.clone(), recorder.clone());
    tokio::spawn(async move {
        if tokio::time::timeout(limit, stopped.cancelled()).await.is_err() {
            recorder.pod_event(&pod, "", EventType::Warning, EXCEEDED.0, EXCEEDED.1);
        }
    });
}

const EXCEEDED: (&str, &str) =
    ("ExceededGracePeriod", "Container runtime did not kill the pod within specified grace period.");

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::testing::pod;
    use crate::recorder::testing::listening;

    #[tokio::test(start_paused = true)]
    async fn a_late_termination_is_recorded() {
        // The pod's grace period, a requested one, and the time of the event in seconds.
        for (own, requested, due) in [(None, None, 10), (Some(30), None, 45), (Some(30), Some(2), 10)] {
            let mut pod = pod("Always", &[], &["a"]);
            pod.spec.as_mut().expect("a spec").termination_grace_period_seconds = own;
            let (recorder, mut recorded) = listening();
            let finished = Some(CancellationToken::new());
            let mut options = KillOptions { grace: requested, finished, ..KillOptions::default() };
            bound_grace_period(&Arc::new(pod), &mut options, &recorder);
            tokio::time::sleep(Duration::from_secs(due - 1)).await;
            assert_eq!(recorded.take(), Vec::<String>::new());
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert_eq!(recorded.take(), [format!("pod W {}: {}", EXCEEDED.0, EXCEEDED.1)]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_termination_in_time_is_not_recorded() {
        let (recorder, mut recorded) = listening();
        let (pod, finished) = (Arc::new(pod("Always", &[], &["a"])), CancellationToken::new());
        let mut options = KillOptions { finished: Some(finished.clone()), ..KillOptions::default() };
        bound_grace_period(&pod, &mut options, &recorder);
        bound_grace_period(&pod, &mut KillOptions::default(), &recorder);
        tokio::time::sleep(Duration::from_secs(5)).await;
        options.stopped.expect("a token").cancel();
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert!(!finished.is_cancelled(), "its volumes are still being released");
        assert_eq!(recorded.take(), Vec::<String>::new());
    }
}
