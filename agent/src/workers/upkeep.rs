//! Keeping a running pod's volumes up to date: when one of the objects they are made from has changed, when the pod
//! itself has, when a token in them grows old. Costs nothing while none of that happens.

use std::sync::Arc;
use std::sync::Weak;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use tokio::time::Instant;

use super::act;
use super::worker::Worker;
use crate::model::Pod;

/// What a worker remembers of its pod's volumes.
#[derive(Default)]
pub(super) struct Kept {
    /// The pod whose objects are claimed. Not held: every later status is in a pod of its own, and a quiet worker would
    /// keep the first one for good.
    claimed: Weak<ApiPod>,
    /// What the volumes were last made from: the pod, and the generation of its objects.
    made_from: Option<(Weak<ApiPod>, u64)>,
    /// When they are to be looked at again in any case.
    due: Option<Instant>,
    /// Failures in a row.
    failures: u32,
}

impl Kept {
    /// True if `pod` is the one whose objects are claimed.
    fn has_claimed(&self, pod: &Pod) -> bool {
        is(&self.claimed, pod)
    }

    /// True if the volumes were last made from this.
    fn is_made_from(&self, pod: &Pod, generation: u64) -> bool {
        self.made_from.as_ref().is_some_and(|(of, seen)| is(of, pod) && *seen == generation)
    }
}

impl Worker {
    /// Claims the pod's objects, anew when the pod has changed.
    pub(super) fn claim_objects(&mut self, pod: &Pod) {
        if self.syncing.volumes.has_claimed(pod) {
            return;
        }
        self.context.act.objects.register(pod, &mut self.interest);
        self.syncing.volumes.claimed = Arc::downgrade(pod);
    }

    /// Brings volumes up to date that are not; returns when to look again.
    pub(super) async fn keep_volumes(&mut self, pod: &Pod) -> Option<Instant> {
        if !self.context.act.volumes.can_change(pod) {
            return None;
        }
        let generation = self.interest.generation();
        let kept = &self.syncing.volumes;
        if kept.is_made_from(pod, generation) && kept.due.is_none_or(|due| Instant::now() < due) {
            return kept.due;
        }
        let refreshed = act::refresh_volumes(&self.context.act, pod).await;
        self.syncing.volumes.made_from = Some((Arc::downgrade(pod), generation));
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

/// True if `this` was made of `pod`. No other pod takes its place in memory while `this` is there.
fn is(this: &Weak<ApiPod>, pod: &Pod) -> bool {
    std::ptr::eq(this.as_ptr(), Arc::as_ptr(pod))
}

/// The earlier of two moments, if there are any.
pub(super) fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_recognised_without_being_held() {
        let (pod, later) = (Pod::default(), Pod::default());
        let kept =
            Kept { claimed: Arc::downgrade(&pod), made_from: Some((Arc::downgrade(&pod), 3)), ..Kept::default() };
        assert!(kept.has_claimed(&pod) && !kept.has_claimed(&later));
        assert!(kept.is_made_from(&pod, 3) && !kept.is_made_from(&pod, 4) && !kept.is_made_from(&later, 3));
        assert_eq!(Arc::strong_count(&pod), 1, "the copy with the old status can go");
    }

    #[test]
    fn who_remembers_nothing_recognises_nothing() {
        let (kept, pod) = (Kept::default(), Pod::default());
        assert!(!kept.has_claimed(&pod) && !kept.is_made_from(&pod, 0));
    }
}
