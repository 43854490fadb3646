//! The status manager's loop: takes changed pods, decides the next request, keeps a bounded number in flight.

use std::collections::HashMap;
use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use futures_util::FutureExt as _;
use futures_util::StreamExt as _;
use indexmap::IndexSet;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio::time::MissedTickBehavior;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;
use tokio_util::time::DelayQueue;
use tokio_util::time::delay_queue;

use super::action;
use super::action::SyncAction;
use super::api::PodApi;
use super::api::PodApiError;
use super::backoff;
use super::sync_state::Reading;
use super::sync_state::SyncState;
use super::sync_state::patch_hash;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::pacing::FirstStatusHold;
use crate::retry::Operation;
use crate::retry::RetryTracker;
use crate::status::ApiStatusView;
use crate::status::Statuses;
use crate::status::time;

/// Concurrent requests. A busy API server would answer all of a larger number as late as the last of them; a status that
/// waits here can still be replaced by a newer one.
const AT_ONCE: usize = 4;
/// A request that takes longer than this frees its slot: the API server is not busy with it.
const SLOW: Duration = Duration::from_millis(250);
/// Limit of concurrent requests including slow ones; the client's rate limit applies as well.
const AT_MOST: usize = 32;
/// Period of comparing all pods with their API copies, whose status another client may have changed.
const RECONCILE: Duration = Duration::from_secs(10);

/// Keeps the API copies of pods in sync with the status cache. Only one may run.
pub struct StatusManager {
    /// The status cache.
    pub statuses: Statuses,
    /// API copies and changed pods.
    pub api_view: Arc<ApiStatusView>,
    /// Requests.
    pub api: Arc<dyn PodApi>,
    /// Holds back first statuses.
    pub first_status: FirstStatusHold,
    /// Time.
    pub clock: Clock,
    /// Latencies.
    pub metrics: Arc<Metrics>,
    /// Statuses that the API server does not accept.
    pub retries: RetryTracker,
}

impl StatusManager {
    /// Runs until `shutdown`; requests in flight are then dropped. The next start of the agent sends what was not sent.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut sending = Sending {
            manager: self,
            states: HashMap::new(),
            queue: IndexSet::new(),
            in_flight: HashMap::new(),
            requests: JoinSet::new(),
            retries: DelayQueue::new(),
            pauses: HashMap::new(),
            refused: HashMap::new(),
            starting: HashMap::new(),
        };
        let _ = shutdown.run_until_cancelled(sending.run()).await;
    }
}

struct Sending {
    manager: StatusManager,
    states: HashMap<PodUid, SyncState>,
    /// Pods to sync, oldest change first.
    queue: IndexSet<PodUid>,
    /// Pods with a request in flight.
    in_flight: HashMap<PodUid, RequestInFlight>,
    requests: JoinSet<(PodUid, Result<Completed, PodApiError>)>,
    retries: DelayQueue<PodUid>,
    /// Pods whose last attempt failed and whose next one is not due yet.
    pauses: HashMap<PodUid, Pause>,
    /// Pods whose last status is not accepted, and the target under which that is reported.
    refused: HashMap<PodUid, String>,
    /// Pods whose first status is held back, and the deadline.
    starting: HashMap<PodUid, Instant>,
}

/// A request in flight.
struct RequestInFlight {
    copy: Pod,
    /// The status that the request sent, if any.
    sent: Option<SentStatus>,
    /// The newest status when the request was made.
    version: u64,
    /// The pod changed meanwhile.
    again: bool,
    since: Instant,
}

/// The time after a failed attempt in which no other is made.
struct Pause {
    /// Its end, in the queue of retries.
    end: delay_queue::Key,
    since: Instant,
    length: Duration,
    /// The newest status when the attempt was made.
    version: u64,
}

/// The status that a PATCH carries.
#[derive(Clone, Copy)]
struct SentStatus {
    version: u64,
    made_at: SystemTime,
    patch_hash: u64,
}

/// The outcome of a completed request.
enum Completed {
    Pod(Box<ApiPod>),
    Deleted,
}

enum Request {
    Get,
    Patch(Value),
    Delete,
}

impl Sending {
    async fn run(&mut self) {
        let mut reconcile = tokio::time::interval(RECONCILE);
        reconcile.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let api_view = self.manager.api_view.clone();
        let hold = self.manager.first_status.clone();
        loop {
            self.send();
            let slow = self.next_slow();
            let held = self.next_held();
            tokio::select! {
                changed = api_view.changes.take() => self.queue.extend(changed),
                Some(Ok((uid, result))) = self.requests.join_next(), if !self.requests.is_empty() => {
                    self.on_done(uid, result);
                }
                Some(due) = self.retries.next(), if !self.retries.is_empty() => {
                    let uid = due.into_inner();
                    self.pauses.remove(&uid);
                    self.queue.insert(uid);
                }
                _ = reconcile.tick() => self.reconcile(),
                () = sleep_until(slow), if !self.queue.is_empty() => {}
                () = hold.released(held.unwrap_or_else(Instant::now)), if held.is_some() => {
                    self.queue.extend(self.starting.keys().cloned());
                }
            }
        }
    }

    fn reconcile(&mut self) {
        let known: HashSet<PodUid> = self.manager.statuses.uids().into_iter().collect();
        self.states.retain(|uid, _| known.contains(uid));
        // A pod that was deleted at the API server may still be terminating here.
        let copies = &self.manager.api_view.copies;
        let is_gone = |uid: &&PodUid| !known.contains(*uid) || copies.api_copy(uid).is_none();
        let gone: Vec<PodUid> = self.refused.keys().filter(is_gone).cloned().collect();
        gone.iter().for_each(|uid| self.settled(uid));
        self.queue.extend(known);
    }

    /// Starts requests for queued pods while there is room.
    fn send(&mut self) {
        while self.has_room() {
            let Some(uid) = self.queue.shift_remove_index(0) else { return };
            if let Some(request) = self.in_flight.get_mut(&uid) {
                request.again = true;
            } else if self.may_try(&uid) {
                self.sync_pod(uid);
            }
        }
    }

    /// Whether no pause after a failed attempt is left; one that is over ends. A changed status shortens the pause: that of
    /// the refused one may be long.
    fn may_try(&mut self, uid: &PodUid) -> bool {
        let Some(pause) = self.pauses.get(uid) else { return true };
        let newest = self.manager.statuses.stored(uid).map(|stored| stored.version);
        let is_changed = newest.is_some_and(|version| version != pause.version);
        let end = pause.since + backoff::pause(pause.length, is_changed);
        if end > Instant::now() {
            self.retries.reset_at(&pause.end, end);
            return false;
        }
        self.retries.remove(&pause.end);
        self.pauses.remove(uid);
        true
    }

    fn has_room(&self) -> bool {
        let prompt = self.in_flight.values().filter(|request| request.since.elapsed() < SLOW);
        self.in_flight.len() < AT_MOST && prompt.count() < AT_ONCE
    }

    /// When the next request will count as slow; far off if none will.
    fn next_slow(&self) -> Instant {
        let slow = self.in_flight.values().map(|request| request.since + SLOW).filter(|at| *at > Instant::now());
        slow.min().unwrap_or_else(|| Instant::now() + RECONCILE)
    }

    /// The earliest deadline of a first status that is held back and not in the queue.
    fn next_held(&self) -> Option<Instant> {
        self.starting.iter().filter(|(uid, _)| !self.queue.contains(*uid)).map(|(_, until)| *until).min()
    }

    fn sync_pod(&mut self, uid: PodUid) {
        let manager = &self.manager;
        let deadline = self.starting.remove(&uid).unwrap_or_else(|| manager.first_status.deadline());
        let stored = manager.statuses.stored(&uid);
        let Some((stored, watched)) = stored.zip(manager.api_view.copies.api_copy(&uid)) else { return };
        let state = self.states.entry(uid.clone()).or_default();
        match state.reading(&watched, Instant::now()) {
            Reading::NotNeeded => {}
            Reading::Due => return self.request(uid, watched, stored.version, None, Request::Get),
            // Reconciling checks again.
            Reading::Later => return,
        }
        let copy = state.newest(watched);
        if state.is_in_sync(stored.version, &copy) {
            return;
        }
        let now = manager.clock.wall();
        match action::next(&uid, &stored, &copy, &time::of_wall(now)) {
            SyncAction::None => {
                state.set_in_sync(stored.version, &copy);
                self.settled(&uid);
            }
            SyncAction::DeferrablePatch(_) if now.duration_since(stored.at).is_ok_and(|age| age < RECONCILE) => {}
            SyncAction::FirstPatch(_) if manager.first_status.holds(deadline) => {
                self.starting.insert(uid, deadline);
            }
            SyncAction::Patch(patch) | SyncAction::DeferrablePatch(patch) | SyncAction::FirstPatch(patch) => {
                let patch_hash = patch_hash(&patch);
                if state.is_without_effect(stored.version, patch_hash, &copy) {
                    tracing::debug!(pod = %pod_ref(&copy), %patch, "the API server does not keep these status fields");
                    if action::may_delete(&uid, &stored, &copy) {
                        return self.request(uid, copy, stored.version, None, Request::Delete);
                    }
                    state.set_in_sync(stored.version, &copy);
                    return self.settled(&uid);
                }
                let sent = Some(SentStatus { version: stored.version, made_at: stored.at, patch_hash });
                self.request(uid, copy, stored.version, sent, Request::Patch(patch));
            }
            SyncAction::Delete => self.request(uid, copy, stored.version, None, Request::Delete),
        }
    }

    fn may_go(&self, uid: &PodUid, copy: &ApiPod) -> bool {
        spec::deletion_requested(copy) && self.manager.statuses.stored(uid).is_some_and(|stored| stored.is_finished)
    }

    fn request(&mut self, uid: PodUid, copy: Pod, version: u64, sent: Option<SentStatus>, request: Request) {
        let (api, at) = (self.manager.api.clone(), pod_ref(&copy));
        let in_flight = RequestInFlight { copy, sent, version, again: false, since: Instant::now() };
        self.in_flight.insert(uid.clone(), in_flight);
        self.requests.spawn(async move {
            let made = AssertUnwindSafe(make(&*api, &at, request)).catch_unwind().await;
            (uid, made.unwrap_or_else(|_| Err(PodApiError::Unanswered("the client panicked".to_owned()))))
        });
    }

    fn on_done(&mut self, uid: PodUid, result: Result<Completed, PodApiError>) {
        let Some(request) = self.in_flight.remove(&uid) else { return };
        let state = self.states.entry(uid.clone()).or_default();
        let at = pod_ref(&request.copy);
        match result {
            Ok(Completed::Pod(pod)) if pod.metadata.uid == request.copy.metadata.uid => {
                self.on_answer(uid, &request, *pod);
            }
            Ok(Completed::Pod(_)) => {
                state.set_gone(&request.copy);
                self.settled(&uid);
                tracing::debug!(pod = %at, "another pod has this name at the API server");
                self.queue.extend(request.again.then_some(uid));
            }
            Err(PodApiError::NotFound) => {
                let wait = state.set_absent(&request.copy, Instant::now());
                self.settled(&uid);
                tracing::debug!(pod = %at, retry_in = ?wait, "pod does not exist at the API server");
                self.queue.extend(request.again.then_some(uid));
            }
            Ok(Completed::Deleted) => {
                state.set_gone(&request.copy);
                self.settled(&uid);
                tracing::info!(pod = %at, "pod deleted from the API server");
            }
            Err(PodApiError::Undecodable(error)) => {
                state.answered_undecodably(request.sent.map(|sent| sent.version), &request.copy);
                if request.sent.is_some() {
                    self.settled(&uid);
                }
                tracing::warn!(pod = %at, error, "the API server answers with a pod that cannot be decoded");
                self.queue.insert(uid);
            }
            Err(error) => {
                state.answer_lost |= !matches!(error, PodApiError::Refused(_));
                let length = match error.is_answer() {
                    true => self.refused(&uid, &at, &error),
                    false => unanswered(state, &at, &error),
                };
                let (end, since) = (self.retries.insert(uid.clone(), length), Instant::now());
                self.pauses.insert(uid.clone(), Pause { end, since, length, version: request.version });
                // The status may have changed during the request.
                self.queue.extend(request.again.then_some(uid));
            }
        }
    }

    /// The API server has answered with the pod as it is now.
    fn on_answer(&mut self, uid: PodUid, request: &RequestInFlight, pod: ApiPod) {
        let state = self.states.entry(uid.clone()).or_default();
        if let Some(sent) = request.sent {
            state.set_patched(sent.version, sent.patch_hash, &pod);
        }
        state.answered(pod);
        if let Some(sent) = request.sent.filter(|sent| sent.version > state.measured) {
            state.measured = sent.version;
            let (at, version) = (pod_ref(&request.copy), sent.version);
            let since = self.manager.clock.wall().duration_since(sent.made_at).unwrap_or_default();
            self.manager.metrics.pods.status_synced(since);
            tracing::debug!(pod = %at, version, latency = ?since, "status sent");
        }
        if request.sent.is_some() {
            self.settled(&uid);
        }
        // There may be a newer status by now. Deletions go before other pods' statuses.
        if self.may_go(&uid, &request.copy) {
            self.queue.shift_insert(0, uid);
        } else {
            self.queue.insert(uid);
        }
    }

    /// The API server has not accepted a request. Returns the pause before the next.
    fn refused(&mut self, uid: &PodUid, at: &PodRef, error: &PodApiError) -> Duration {
        // A mirror pod that is made again has another UID.
        let target = || PodRef { uid: uid.clone(), ..at.clone() }.with_uid();
        let target = self.refused.entry(uid.clone()).or_insert_with(target);
        let due = self.manager.retries.failed(Operation::SendStatus, target, &error.to_string());
        due.saturating_duration_since(Instant::now())
    }

    /// The API server has what there is to send of a pod, or the pod is gone.
    fn settled(&mut self, uid: &PodUid) {
        if let Some(target) = self.refused.remove(uid) {
            self.manager.retries.succeeded(Operation::SendStatus, &target);
        }
    }
}

/// A request was not answered. Returns the pause before the next.
fn unanswered(state: &mut SyncState, at: &PodRef, error: &PodApiError) -> Duration {
    let error = error.to_string();
    let (failures, is_new) = state.failed(&error);
    let wait = backoff::after(failures, fastrand::f64());
    if is_new {
        tracing::warn!(pod = %at, error, retry_in = ?wait, "failed to send pod status");
    } else {
        tracing::debug!(pod = %at, error, failures, retry_in = ?wait, "failed to send pod status again");
    }
    wait
}

async fn make(api: &dyn PodApi, at: &PodRef, request: Request) -> Result<Completed, PodApiError> {
    match request {
        Request::Get => api.get(at).await.map(|pod| Completed::Pod(Box::new(pod))),
        Request::Patch(patch) => api.patch_status(at, &patch).await.map(|pod| Completed::Pod(Box::new(pod))),
        Request::Delete => api.delete(at).await.map(|()| Completed::Deleted),
    }
}
