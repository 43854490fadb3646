//! Refreshes the volumes of a running pod: when an API object they are made from changes, when the pod changes, and before
//! a token in them expires. Nothing is read otherwise.

use std::sync::Arc;
use std::sync::Weak;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use tokio::time::Instant;

use super::act;
use super::worker::Worker;
use crate::model::Pod;

/// Refresh state of one pod's volumes.
#[derive(Default)]
pub(super) struct VolumeRefresh {
    /// The pod whose objects are registered. A weak reference: each API status update is a new pod object, and an idle
    /// worker would keep the first one in memory.
    registered: Weak<ApiPod>,
    /// The pod and the generation of its objects at the last refresh.
    made_from: Option<(Weak<ApiPod>, u64)>,
    /// When the next refresh is due in any case.
    due: Option<Instant>,
    /// Failures in a row.
    failures: u32,
}

impl VolumeRefresh {
    /// True if the objects of this very pod object are registered.
    fn is_registered(&self, pod: &Pod) -> bool {
        is(&self.registered, pod)
    }

    /// True if the last refresh used this pod object and this generation.
    fn is_made_from(&self, pod: &Pod, generation: u64) -> bool {
        self.made_from.as_ref().is_some_and(|(of, seen)| is(of, pod) && *seen == generation)
    }

    /// Counts a failure; returns when to retry.
    pub(super) fn failed(&mut self) -> Instant {
        self.failures += 1;
        Instant::now() + act::retry_volumes_after(self.failures)
    }
}

impl Worker {
    /// Registers the API objects the pod refers to; again when the pod has changed.
    pub(super) fn register_objects(&mut self, state: &mut VolumeRefresh, pod: &Pod) {
        if state.is_registered(pod) {
            return;
        }
        self.context.act.objects.register(pod, &mut self.interest);
        state.registered = Arc::downgrade(pod);
    }

    /// Refreshes volumes that are out of date; returns when the next refresh is due.
    pub(super) async fn refresh_volumes(&self, state: &mut VolumeRefresh, pod: &Pod) -> Option<Instant> {
        if !self.context.act.volumes.can_change(pod) {
            return None;
        }
        let generation = self.interest.generation();
        if state.is_made_from(pod, generation) && state.due.is_none_or(|due| Instant::now() < due) {
            return state.due;
        }
        let refreshed = act::refresh_volumes(&self.context.act, pod).await;
        state.made_from = Some((Arc::downgrade(pod), generation));
        match refreshed {
            Ok(refreshed) => {
                let after = refreshed.refresh_after.map(|after| Instant::now() + after);
                state.failures = 0;
                state.due = earliest(refreshed.refresh_at.map(|at| self.at(at)), after);
            }
            Err(error) => {
                tracing::warn!(pod = %self.pod_ref, %error, "cannot refresh volumes");
                state.due = Some(state.failed());
            }
        }
        state.due
    }
}

/// True if `this` refers to `pod`. The address is not reused while a weak reference exists.
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
    fn a_pod_is_recognised_without_a_strong_reference() {
        let (pod, later) = (Pod::default(), Pod::default());
        let state = VolumeRefresh {
            registered: Arc::downgrade(&pod),
            made_from: Some((Arc::downgrade(&pod), 3)),
            ..VolumeRefresh::default()
        };
        assert!(state.is_registered(&pod) && !state.is_registered(&later));
        assert!(state.is_made_from(&pod, 3) && !state.is_made_from(&pod, 4) && !state.is_made_from(&later, 3));
        assert_eq!(Arc::strong_count(&pod), 1, "the pod object with the old status can be freed");
    }

    #[test]
    fn the_initial_state_matches_no_pod() {
        let (state, pod) = (VolumeRefresh::default(), Pod::default());
        assert!(!state.is_registered(&pod) && !state.is_made_from(&pod, 0));
    }
}
