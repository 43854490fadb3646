//! Keeping a running pod's volumes up to date: when one of the objects they are made from has changed, when the pod
//! itself has, when a token in them grows old. Costs nothing while none of that happens.

use tokio::time::Instant;

use super::act;
use super::worker::Worker;
use crate::model::Pod;

/// What a worker remembers of its pod's volumes.
#[derive(Default)]
pub(super) struct Kept {
    /// The pod whose objects are claimed.
    claimed: Option<Pod>,
    /// What the volumes were last made from: the pod, and the generation of its objects.
    made_from: Option<(Pod, u64)>,
    /// When they are to be looked at again in any case.
    due: Option<Instant>,
    /// Failures in a row.
    failures: u32,
}

impl Worker {
    /// Claims the pod's objects, anew when the pod has changed.
    pub(super) fn claim_objects(&mut self, pod: &Pod) {
        if self.syncing.volumes.claimed.as_ref().is_some_and(|claimed| Pod::ptr_eq(claimed, pod)) {
            return;
        }
        self.context.act.objects.register(pod, &mut self.interest);
        self.syncing.volumes.claimed = Some(pod.clone());
    }

    /// Brings volumes up to date that are not; returns when to look again.
    pub(super) async fn keep_volumes(&mut self, pod: &Pod) -> Option<Instant> {
        if !self.context.act.volumes.can_change(pod) {
            return None;
        }
        let generation = self.interest.generation();
        let kept = &self.syncing.volumes;
        let same = kept.made_from.as_ref().is_some_and(|(of, seen)| Pod::ptr_eq(of, pod) && *seen == generation);
        if same && kept.due.is_none_or(|due| Instant::now() < due) {
            return kept.due;
        }
        let refreshed = act::refresh_volumes(&self.context.act, pod).await;
        self.syncing.volumes.made_from = Some((pod.clone(), generation));
        match refreshed {
            Ok(upkeep) => {
                let after = upkeep.refresh_after.map(|after| Instant::now() + after);
                self.syncing.volumes.failures = 0;
                self.syncing.volumes.due = earliest(upkeep.refresh_at.map(|at| self.at(at)), after);
            }
            Err(error) => {
                tracing::warn!(pod = %self.pod_ref(), error, "volumes not brought up to date");
                self.syncing.volumes.due = Some(self.volumes_failed());
            }
        }
        self.syncing.volumes.due
    }

    /// Counts a failure; returns when to try again.
    pub(super) fn volumes_failed(&mut self) -> Instant {
        self.syncing.volumes.failures += 1;
        Instant::now() + act::retry_volumes_after(self.syncing.volumes.failures)
    }
}

/// The earlier of two moments, if there are any.
pub(super) fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}
