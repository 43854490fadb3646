//! Evictions that an earlier agent has decided and not finished: the pod may still run, or its end is not known to the API
//! server, so that the pod would be started again.

use std::time::Duration;

use tokio::time::Instant;

use super::journal::EvictionRecord;
use super::manager::Manager;
use super::observe::Observe;
use super::pace;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::workers::state::Phase;

/// For how long pods are awaited whose eviction an earlier agent did not finish, once all sources have delivered their pods
/// or unreadable manifests have been waited for in vain. A record is ignored if no agent has run for this long.
pub(super) const RESUME_PERIOD: Duration = Duration::from_secs(600);
/// The age at which the records of evictions are renewed that are not finished yet: short beside [`RESUME_PERIOD`], which
/// counts from the last renewal.
const RENEWAL_AGE: Duration = Duration::from_secs(60);
/// Within this time the sources usually have delivered their pods.
const SOURCES_DELIVER: Duration = Duration::from_secs(30);

impl<O: Observe> Manager<O> {
    /// The agent has just been started, and a pod whose eviction it has to finish may become known at any moment.
    pub(super) fn is_resuming(&self) -> bool {
        !self.parts.journal.inherited().is_empty() && self.started.elapsed() < SOURCES_DELIVER
    }

    /// Ends pods whose eviction an earlier agent has recorded and not finished. It was announced and counted then. Returns
    /// true if it ended one.
    pub(super) async fn resume(&mut self, active: &[Pod]) -> bool {
        let mut has_ended_one = false;
        for entry in self.parts.journal.inherited() {
            let uid = PodUid::from(entry.uid.as_str());
            let resumed = match active.iter().find(|pod| pod_ref(pod).uid == uid) {
                Some(pod) => self.resume_one(pod, entry).await,
                None => self.resume_on_creation(uid, &entry).await.map(|()| false),
            };
            match resumed {
                Ok(has_ended) => has_ended_one |= has_ended,
                // The next pass tries again: each entry may wait for the runtime.
                Err(error) => {
                    tracing::debug!(error, "cannot determine whether evicted pods were started again");
                    break;
                }
            }
        }
        if self.parts.pods.are_complete() && self.sources_ready_at.is_none() {
            self.sources_ready_at = Some(Instant::now());
        }
        if self.sources_ready_at.is_some_and(|ready| ready.elapsed() > RESUME_PERIOD) {
            for entry in self.parts.journal.take_inherited().await {
                self.parts.pods.expect_no_more(&PodUid::from(entry.uid));
            }
        }
        has_ended_one
    }

    async fn resume_one(&mut self, pod: &Pod, entry: EvictionRecord) -> Result<bool, String> {
        let uid = pod_ref(pod).uid;
        self.parts.pods.expect_no_more(&uid);
        let still_holds = self.still_holds(&uid, &entry).await?;
        if still_holds {
            tracing::info!(pod = %pod_ref(pod).full_name(), "finishing the eviction that another agent has begun");
            // What this agent has created of the pod since its start does not count if the next one resumes.
            let entry = EvictionRecord { decided_at: self.parts.clock.wall_nanos(), ..entry };
            self.parts.journal.add(entry.clone()).await;
            self.end(&[(pod.clone(), entry)]).await;
        }
        Ok(still_holds)
    }

    /// A pod without worker is terminated as soon as it has one: the source may deliver it at any time, and between two
    /// passes a container could be started.
    async fn resume_on_creation(&mut self, uid: PodUid, entry: &EvictionRecord) -> Result<(), String> {
        match self.parts.pods.phase(&uid) {
            // It has ended, and is reported.
            Some(Phase::Terminated | Phase::Finished) => {
                self.parts.pods.expect_no_more(&uid);
                self.parts.journal.take_over(&uid);
            }
            // The next pass ends it.
            Some(Phase::Syncing | Phase::Terminating) => {}
            None if self.parts.pods.is_expected(&uid) => {}
            None => {
                if self.still_holds(&uid, entry).await? {
                    self.parts.pods.evict_on_creation(uid, entry.grace, entry.termination_reason());
                }
            }
        }
        Ok(())
    }

    /// The pod was not started again since its eviction was decided. If it was, it stays, and the entry is removed.
    async fn still_holds(&mut self, uid: &PodUid, entry: &EvictionRecord) -> Result<bool, String> {
        let created = self.parts.observe.created(uid).await?;
        let is_outlived = entry.is_outlived(&created, self.started_at);
        if is_outlived {
            tracing::info!(%uid, "the eviction was not finished and the pod was started again since: it stays");
            self.parts.journal.remove(uid).await;
        }
        Ok(!is_outlived)
    }

    /// Keeps the records of preempted pods as long as they count, where nothing is evicted.
    pub(super) async fn keep_records(&mut self) {
        loop {
            self.remove_reported().await;
            tokio::time::sleep(pace::LONGEST).await;
        }
    }

    /// Removes the records of evictions of this agent that the next one would have nothing to do for. The others stay
    /// current: the API server may be away for longer than [`RESUME_PERIOD`].
    pub(super) async fn remove_reported(&mut self) {
        for entry in self.parts.journal.own() {
            let uid = PodUid::from(entry.uid);
            let has_ended = self.parts.pods.phase(&uid).is_none_or(|phase| phase >= Phase::Terminated);
            if has_ended && self.parts.pods.is_end_reported(&uid) {
                self.parts.journal.remove(&uid).await;
            }
        }
        let (now, pods) = (self.parts.clock.wall_nanos(), &self.parts.pods);
        self.parts.journal.renew(now, RENEWAL_AGE, |uid| pods.is_expected(uid)).await;
    }
}
