//! Refreshes the volumes of a running pod: when an API object they are made from changes, when the pod changes, and before
//! a token in them expires. Nothing is read otherwise.

use std::sync::Arc;
use std::sync::Weak;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use tokio::time::Instant;

use super::act;
use super::worker::PhaseData;
use super::worker::Worker;
use crate::model::Pod;

/// How long after a refresh content may be replaced again since it is out of date. Where the clock is ahead, a token is as soon
/// as it is issued; a kubelet asks for the next one when it syncs the pod, once in a period like this.
const REPLACEMENT_PAUSE: Duration = Duration::from_secs(60);

/// How often the wall clock is looked at while content expires by it: it may be set, and it goes on while the machine is
/// suspended, when monotonic time does not.
const LOOK_PERIOD: Duration = Duration::from_secs(60);

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
    /// Of what the last refresh has written, unless it failed.
    expiry: Option<Expiry>,
    /// Failures in a row.
    failures: u32,
}

/// The end of content by the wall clock.
#[derive(Clone, Copy)]
struct Expiry {
    at: SystemTime,
    /// It is not replaced before this.
    not_before: Instant,
}

impl Expiry {
    /// When the content is to be replaced, if the clock is not set until then.
    fn due(self, now: Instant, wall: SystemTime) -> Instant {
        (now + self.at.duration_since(wall).unwrap_or_default()).max(self.not_before)
    }
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

    /// A refresh has succeeded. Its content is out of date at `expiry`, and read again after a `period` in any case.
    fn succeeded(&mut self, now: Instant, wall: SystemTime, expiry: Option<SystemTime>, period: Option<Duration>) {
        self.failures = 0;
        self.expiry = expiry.map(|at| Expiry { at, not_before: now + REPLACEMENT_PAUSE });
        self.due = earliest(self.expiry.map(|expiry| expiry.due(now, wall)), period.map(|period| now + period));
    }

    /// Looks at the wall clock. Returns when the next refresh is due, if that is earlier than it was known: once, as a pass
    /// that fails must not begin again at once.
    fn look(&mut self, now: Instant, wall: SystemTime) -> Option<Instant> {
        let due = self.expiry?.due(now, wall);
        if self.due.is_some_and(|known| known <= due) {
            return None;
        }
        self.due = Some(due);
        self.due
    }

    /// When to look next: at each full minute of the wall clock, so that the workers of all pods wake the machine once.
    fn next_look(&self, now: Instant, wall: SystemTime) -> Option<Instant> {
        self.due.filter(|due| self.expiry.is_some() && now < *due)?;
        let since_epoch = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let into_period = Duration::from_secs(since_epoch.as_secs() % LOOK_PERIOD.as_secs());
        Some(now + LOOK_PERIOD.saturating_sub(into_period + Duration::from_nanos(since_epoch.subsec_nanos().into())))
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
        state.look(Instant::now(), self.context.clock.wall());
        let generation = self.interest.generation();
        if state.is_made_from(pod, generation) && state.due.is_none_or(|due| Instant::now() < due) {
            return state.due;
        }
        let refreshed = act::refresh_volumes(&self.context.act, pod).await;
        state.made_from = Some((Arc::downgrade(pod), generation));
        match refreshed {
            Ok(refreshed) => {
                let wall = self.context.clock.wall();
                state.succeeded(Instant::now(), wall, refreshed.refresh_at, refreshed.refresh_after);
            }
            Err(error) => {
                tracing::warn!(pod = %self.pod_ref, %error, "cannot refresh volumes");
                state.due = Some(state.failed());
                state.expiry = None;
            }
        }
        state.due
    }

    /// Looks at the wall clock between two passes. Returns when the next refresh is due, if that is earlier than it was known;
    /// and when to look again. Costs nothing but the wake-up.
    pub(super) fn look_at_clock(&mut self) -> (Option<Instant>, Option<Instant>) {
        let PhaseData::Syncing(state) = &mut self.phase else { return (None, None) };
        let (now, wall) = (Instant::now(), self.context.clock.wall());
        (state.volumes.look(now, wall), state.volumes.next_look(now, wall))
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

    const WALL: SystemTime = SystemTime::UNIX_EPOCH;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

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
    fn a_token_that_is_issued_out_of_date_is_not_replaced_at_once() {
        let (mut state, now, second) = (VolumeRefresh::default(), Instant::now(), Duration::from_secs(1));
        let mut due = |expiry: Option<u32>, period: Option<u32>| {
            state.succeeded(now, WALL, expiry.map(|after| WALL + after * second), period.map(|after| after * second));
            state.due.map(|due| due.duration_since(now).as_secs())
        };
        assert_eq!(due(Some(0), None), Some(60));
        assert_eq!(due(Some(59), None), Some(60));
        assert_eq!(due(Some(2886), None), Some(2886));
        assert_eq!(due(Some(2886), Some(70)), Some(70));
        assert_eq!(due(Some(0), Some(10)), Some(10), "objects that are not watched are read as often as configured");
        assert_eq!(due(None, None), None);
    }

    #[test]
    fn a_clock_that_goes_forward_makes_a_refresh_due() {
        let (mut state, now) = (VolumeRefresh::default(), Instant::now());
        assert_eq!((state.look(now, WALL), state.next_look(now, WALL)), (None, None), "nothing expires");
        state.succeeded(now, WALL, Some(WALL + seconds(2886)), None);
        let minute = now + seconds(60);
        assert_eq!(state.look(minute, WALL + seconds(60)), None, "both clocks agree");
        assert_eq!(state.look(minute, WALL - seconds(9000)), None, "set back");
        assert_eq!(state.look(minute, WALL + seconds(1060)), Some(now + seconds(1886)), "set forward");
        assert_eq!(state.look(minute, WALL + seconds(3000)), Some(minute), "out of date after a suspend");
        assert_eq!(state.look(minute, WALL + seconds(9000)), None, "said once");
        assert_eq!(state.next_look(minute, WALL + seconds(9000)), None, "the pass has its own retries");
        state.succeeded(minute, WALL + seconds(9000), Some(WALL), None);
        assert_eq!(state.look(minute + seconds(1), WALL + seconds(9999)), None, "not before the pause is over");
        assert_eq!(state.due, Some(minute + seconds(60)));
    }

    #[test]
    fn the_clock_is_looked_at_on_each_full_minute() {
        let (mut state, now) = (VolumeRefresh::default(), Instant::now());
        state.succeeded(now, WALL, Some(WALL + seconds(86400)), None);
        let next = |since_epoch: Duration| state.next_look(now, WALL + since_epoch).map(|at| at - now);
        assert_eq!(next(seconds(600)), Some(seconds(60)));
        assert_eq!(next(Duration::from_millis(630_250)), Some(Duration::from_millis(29_750)));
        assert_eq!(next(Duration::from_millis(659_999)), Some(Duration::from_millis(1)));
        state.succeeded(now, WALL, None, Some(seconds(600)));
        assert_eq!(state.next_look(now, WALL), None, "a period follows no clock");
    }

    #[test]
    fn the_initial_state_matches_no_pod() {
        let (state, pod) = (VolumeRefresh::default(), Pod::default());
        assert!(!state.is_registered(&pod) && !state.is_made_from(&pod, 0));
    }
}
