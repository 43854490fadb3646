//! Refreshes the volumes of a running pod: when an API object they are made from changes, when the pod changes other than in
//! its status, and before a token in them expires. Nothing is read otherwise.
//!
//! A refresh is made beside the worker's passes: it may wait for the API server or for the server of a volume, and an exit or
//! the termination of the pod does not wait for them.

use std::time::Duration;
use std::time::SystemTime;

use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

use super::act;
use super::act::PodError;
use super::worker::PhaseData;
use super::worker::Worker;
use crate::model::Pod;
use crate::volumes::RefreshDue;

/// How long after a refresh content may be replaced again since it is out of date. Where the clock is ahead, a token is as soon
/// as it is issued; a kubelet asks for the next one when it syncs the pod, once in a period like this.
const REPLACEMENT_PAUSE: Duration = Duration::from_secs(60);

/// How often the wall clock is read while content expires by it: it may be set, and it goes on while the machine is
/// suspended, when monotonic time does not.
pub(super) const CLOCK_CHECK_PERIOD: Duration = Duration::from_secs(60);

/// Refresh state of one pod's volumes.
#[derive(Default)]
pub(super) struct VolumeRefresh {
    /// The [content](super::state::PodState::content) of the pod that the present pass sees: its objects are registered.
    content: Option<u64>,
    /// The content of the pod, and the generation of its objects, at the last refresh.
    made_from: Option<(Option<u64>, u64)>,
    /// When the next refresh is due in any case.
    due: Option<Instant>,
    /// Of what the last refresh has written, unless it failed.
    expiry: Option<Expiry>,
    /// Failures in a row.
    failures: u32,
    /// The refresh in progress. Dropping it leaves the volumes that are being written to the pod's teardown, which waits for
    /// them.
    running: Option<AbortOnDropHandle<Result<RefreshDue, PodError>>>,
    /// The pod or its objects have changed since that one began.
    again: bool,
}

/// How a refresh has ended.
pub(super) type Refreshed = Result<RefreshDue, String>;

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
    /// A pass sees this content of the pod. True if its objects are to be registered.
    fn sees(&mut self, content: u64) -> bool {
        self.content.replace(content) != Some(content)
    }

    /// True if the last refresh used the present content of the pod, and this generation of its objects.
    fn is_current(&self, generation: u64) -> bool {
        self.made_from == Some((self.content, generation))
    }

    /// A refresh has succeeded. Its content is out of date at `expiry`, and read again after a `period` in any case.
    fn succeeded(&mut self, now: Instant, wall: SystemTime, expiry: Option<SystemTime>, period: Option<Duration>) {
        self.failures = 0;
        self.expiry = expiry.map(|at| Expiry { at, not_before: now + REPLACEMENT_PAUSE });
        self.due = earliest(self.expiry.map(|expiry| expiry.due(now, wall)), period.map(|period| now + period));
    }

    /// Reads the wall clock. Returns when the next refresh is due, if that is earlier than it was known: once, as a pass
    /// that fails must not begin again at once.
    fn check_clock(&mut self, now: Instant, wall: SystemTime) -> Option<Instant> {
        let due = self.expiry?.due(now, wall);
        if self.due.is_some_and(|known| known <= due) {
            return None;
        }
        self.due = Some(due);
        self.due
    }

    /// When to read the wall clock next.
    fn next_clock_check(&self, now: Instant, wall: SystemTime) -> Option<Instant> {
        self.due.filter(|due| self.expiry.is_some() && now < *due)?;
        Some(next_full_minute(now, wall))
    }

    /// The refresh in progress has ended. Returns when the next one is due.
    fn ended(&mut self, now: Instant, wall: SystemTime, done: Option<RefreshDue>) -> Option<Instant> {
        self.running = None;
        match done {
            Some(done) => self.succeeded(now, wall, done.refresh_at, done.refresh_after),
            None => self.due = Some(self.failed(false)),
        }
        if std::mem::take(&mut self.again) {
            self.due = Some(now);
        }
        self.due
    }

    /// Counts a failure; returns when to retry. `claims`: a claim cannot be used yet.
    pub(super) fn failed(&mut self, claims: bool) -> Instant {
        self.failures += 1;
        Instant::now() + act::retry_volumes_after(self.failures, claims)
    }
}

impl Worker {
    /// Registers the API objects the pod refers to; again when its content has changed.
    pub(super) fn register_objects(&mut self, state: &mut VolumeRefresh, pod: &Pod, content: u64) {
        if state.sees(content) {
            self.context.act.objects.register(pod, &mut self.interest);
        }
    }

    /// Begins to refresh volumes that are out of date; returns when the next refresh is due. The end of one in progress is
    /// awaited by [`refresh_ended`]. `pod` is the one whose objects the pass has registered.
    pub(super) fn refresh_volumes(&self, state: &mut VolumeRefresh, pod: &Pod) -> Option<Instant> {
        if !self.context.act.volumes.can_change(pod) {
            return None;
        }
        state.check_clock(Instant::now(), self.context.clock.wall());
        let generation = self.interest.generation();
        let is_current = state.is_current(generation);
        if state.running.is_some() {
            state.again |= !is_current;
            return None;
        }
        if is_current && state.due.is_none_or(|due| Instant::now() < due) {
            return state.due;
        }
        state.made_from = Some((state.content, generation));
        (state.due, state.expiry) = (None, None);
        let (context, pod) = (self.context.clone(), pod.clone());
        let refresh = async move { act::refresh_volumes(&context.act, &pod).await };
        state.running = Some(AbortOnDropHandle::new(tokio::spawn(refresh.in_current_span())));
        None
    }

    /// Takes over the end of a refresh; returns when the next one is due.
    pub(super) fn refreshed(&mut self, done: Refreshed) -> Option<Instant> {
        let PhaseData::Syncing(state) = &mut self.phase else { return None };
        if let Err(error) = &done {
            tracing::warn!(pod = %self.pod_ref, error, "cannot refresh volumes");
        }
        state.volumes.ended(Instant::now(), self.context.clock.wall(), done.ok())
    }

    /// Reads the wall clock between two passes. Returns when the next refresh is due, if that is earlier than it was known,
    /// or `activeDeadlineSeconds` end; and when to read it again. Costs nothing but the wake-up.
    pub(super) fn check_clock(&mut self) -> (Option<Instant>, Option<Instant>) {
        let PhaseData::Syncing(state) = &mut self.phase else { return (None, None) };
        let (now, wall) = (Instant::now(), self.context.clock.wall());
        let due = earliest(state.volumes.check_clock(now, wall), state.deadline.check_clock(now, wall));
        (due, earliest(state.volumes.next_clock_check(now, wall), state.deadline.next_clock_check(now, wall)))
    }
}

/// The next full minute of the wall clock, at which the workers of all pods read it, so that they wake the machine once.
pub(super) fn next_full_minute(now: Instant, wall: SystemTime) -> Instant {
    let since_epoch = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let into_period = Duration::from_secs(since_epoch.as_secs() % CLOCK_CHECK_PERIOD.as_secs());
    now + CLOCK_CHECK_PERIOD.saturating_sub(into_period + Duration::from_nanos(since_epoch.subsec_nanos().into()))
}

/// Waits for the end of the refresh in progress, which has to be taken over then; for ever if there is none. Cancel-safe.
pub(super) async fn refresh_ended(phase: &mut PhaseData) -> Refreshed {
    let running = match phase {
        PhaseData::Syncing(state) => state.volumes.running.as_mut(),
        PhaseData::Terminating { .. } | PhaseData::Terminated(_) => None,
    };
    let Some(running) = running else { return std::future::pending().await };
    match running.await {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    }
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
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::Pod as ApiPod;
    use k8s_openapi::api::core::v1::PodStatus;

    use super::super::state::PodState;
    use super::super::state::Request;
    use super::*;
    use crate::model::PodRef;

    const WALL: SystemTime = SystemTime::UNIX_EPOCH;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn volumes_are_out_of_date_when_the_pod_has_changed_other_than_in_its_status() {
        let mut pod = PodState::new(PodRef { uid: "u".into(), namespace: "default".into(), name: "p".into() });
        let mut state = VolumeRefresh::default();
        pod.request(Request::Create(Pod::default()));
        assert!(!state.is_current(0), "not refreshed yet");
        assert!(state.sees(pod.content()) && !state.is_current(0));
        state.made_from = Some((state.content, 0));
        assert!(state.is_current(0) && !state.is_current(1), "unless an object has changed");

        let with_status = ApiPod { status: Some(PodStatus::default()), ..ApiPod::default() };
        pod.refresh(Arc::new(with_status));
        pod.request(Request::Sync);
        assert!(pod.pod.as_ref().is_some_and(|pod| pod.status.is_some()), "the watch has sent the agent's own patch");
        assert!(!state.sees(pod.content()) && state.is_current(0));

        let mut labelled = ApiPod::default();
        labelled.metadata.labels = Some([("app".to_owned(), "web".to_owned())].into());
        pod.request(Request::Update(Arc::new(labelled)));
        assert!(state.is_current(0), "the pass in progress has not seen it");
        assert!(state.sees(pod.content()) && !state.is_current(0));
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
    fn what_changes_during_a_refresh_makes_the_next_one_due_at_once() {
        let (mut state, now) = (VolumeRefresh { again: true, ..VolumeRefresh::default() }, Instant::now());
        assert_eq!(state.ended(now, WALL, Some(RefreshDue::default())), Some(now));
        assert_eq!(state.ended(now, WALL, Some(RefreshDue::default())), None);
        assert!(state.ended(now, WALL, None).is_some_and(|due| due > now), "a failure is retried after a pause");
        state.again = true;
        assert_eq!(state.ended(now, WALL, None), Some(now));
    }

    #[test]
    fn a_clock_that_goes_forward_makes_a_refresh_due() {
        let (mut state, now) = (VolumeRefresh::default(), Instant::now());
        assert_eq!((state.check_clock(now, WALL), state.next_clock_check(now, WALL)), (None, None), "nothing expires");
        state.succeeded(now, WALL, Some(WALL + seconds(2886)), None);
        let minute = now + seconds(60);
        assert_eq!(state.check_clock(minute, WALL + seconds(60)), None, "both clocks agree");
        assert_eq!(state.check_clock(minute, WALL - seconds(9000)), None, "set back");
        assert_eq!(state.check_clock(minute, WALL + seconds(1060)), Some(now + seconds(1886)), "set forward");
        assert_eq!(state.check_clock(minute, WALL + seconds(3000)), Some(minute), "out of date after a suspend");
        assert_eq!(state.check_clock(minute, WALL + seconds(9000)), None, "said once");
        assert_eq!(state.next_clock_check(minute, WALL + seconds(9000)), None, "the pass has its own retries");
        state.succeeded(minute, WALL + seconds(9000), Some(WALL), None);
        assert_eq!(state.check_clock(minute + seconds(1), WALL + seconds(9999)), None, "not before the pause is over");
        assert_eq!(state.due, Some(minute + seconds(60)));
    }

    #[test]
    fn the_clock_is_checked_on_each_full_minute() {
        let (mut state, now) = (VolumeRefresh::default(), Instant::now());
        state.succeeded(now, WALL, Some(WALL + seconds(86400)), None);
        let next = |since_epoch: Duration| state.next_clock_check(now, WALL + since_epoch).map(|at| at - now);
        assert_eq!(next(seconds(600)), Some(seconds(60)));
        assert_eq!(next(Duration::from_millis(630_250)), Some(Duration::from_millis(29_750)));
        assert_eq!(next(Duration::from_millis(659_999)), Some(Duration::from_millis(1)));
        state.succeeded(now, WALL, None, Some(seconds(600)));
        assert_eq!(state.next_clock_check(now, WALL), None, "a period follows no clock");
    }
}
