//! The manager's loop: takes pods with news, finds the next step, has the requests made, a bounded number at a time.

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
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::time::DelayQueue;

use super::api::PodApi;
use super::api::PodApiError;
use super::backoff;
use super::step;
use super::step::Step;
use super::told::Told;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::status::ApiSide;
use crate::status::Statuses;
use crate::status::time;

/// Requests under way at the same time; the client's rate limit comes on top.
const PARALLEL: usize = 32;
/// All pods are compared with their copies this often, should somebody else have written a status.
const RECONCILE: Duration = Duration::from_secs(10);

/// Keeps the API's copies of pods in line with the board. Only one may run.
pub struct StatusManager {
    /// What is to be said.
    pub statuses: Statuses,
    /// What the API says, and who has changed.
    pub side: Arc<ApiSide>,
    /// Requests.
    pub api: Arc<dyn PodApi>,
    /// Time.
    pub clock: Clock,
    /// Latencies.
    pub metrics: Arc<Metrics>,
}

impl StatusManager {
    /// Runs until `shutdown`; requests under way are then abandoned. The next start of the agent says what was not said.
    pub async fn run(self, shutdown: CancellationToken) {
        let mut sending = Sending {
            manager: self,
            told: HashMap::new(),
            queue: IndexSet::new(),
            in_flight: HashMap::new(),
            requests: JoinSet::new(),
            retries: DelayQueue::new(),
            retrying: HashSet::new(),
        };
        let _ = shutdown.run_until_cancelled(sending.run()).await;
    }
}

struct Sending {
    manager: StatusManager,
    told: HashMap<PodUid, Told>,
    /// Pods to look at, oldest news first.
    queue: IndexSet<PodUid>,
    /// Pods with a request under way, and what was asked.
    in_flight: HashMap<PodUid, Asked>,
    requests: JoinSet<(PodUid, Result<Answered, PodApiError>)>,
    retries: DelayQueue<PodUid>,
    retrying: HashSet<PodUid>,
}

/// A request under way.
struct Asked {
    copy: Pod,
    /// Version of the status and when it was made, if the request carries one.
    carries: Option<(u64, SystemTime)>,
    /// There was news meanwhile.
    again: bool,
}

/// What came back.
enum Answered {
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
        let side = self.manager.side.clone();
        loop {
            self.send();
            tokio::select! {
                changed = side.changes.take() => self.queue.extend(changed),
                Some(Ok((uid, result))) = self.requests.join_next(), if !self.requests.is_empty() => {
                    self.on_done(uid, result);
                }
                Some(due) = self.retries.next(), if !self.retries.is_empty() => {
                    let uid = due.into_inner();
                    self.retrying.remove(&uid);
                    self.queue.insert(uid);
                }
                _ = reconcile.tick() => self.reconcile(),
            }
        }
    }

    fn reconcile(&mut self) {
        let known: HashSet<PodUid> = self.manager.statuses.uids().into_iter().collect();
        self.told.retain(|uid, _| known.contains(uid));
        self.queue.extend(known);
    }

    /// Starts requests for queued pods while there is room.
    fn send(&mut self) {
        while self.in_flight.len() < PARALLEL {
            let Some(uid) = self.queue.shift_remove_index(0) else { return };
            if let Some(asked) = self.in_flight.get_mut(&uid) {
                asked.again = true;
            } else if !self.retrying.contains(&uid) {
                self.look_at(uid);
            }
        }
    }

    fn look_at(&mut self, uid: PodUid) {
        let manager = &self.manager;
        let stored = manager.statuses.stored(&uid);
        let Some((stored, watched)) = stored.zip(manager.side.copies.api_copy(&uid)) else { return };
        let told = self.told.entry(uid.clone()).or_default();
        if told.unsure {
            return self.request(uid, watched, None, Request::Get);
        }
        let copy = told.newest(watched);
        if told.is_done(stored.version, &copy) {
            return;
        }
        let now = manager.clock.wall();
        match step::next(&uid, &stored, &copy, &time::of_wall(now)) {
            Step::Nothing => told.settle(stored.version, &copy),
            Step::Later(_) if now.duration_since(stored.at).is_ok_and(|age| age < RECONCILE) => {}
            Step::Patch(patch) | Step::Later(patch) => {
                let carries = Some((stored.version, stored.at));
                self.request(uid, copy, carries, Request::Patch(patch));
            }
            Step::Delete => self.request(uid, copy, None, Request::Delete),
        }
    }

    fn request(&mut self, uid: PodUid, copy: Pod, carries: Option<(u64, SystemTime)>, request: Request) {
        let (api, at) = (self.manager.api.clone(), pod_ref(&copy));
        self.in_flight.insert(uid.clone(), Asked { copy, carries, again: false });
        self.requests.spawn(async move {
            let made = AssertUnwindSafe(make(&*api, &at, request)).catch_unwind().await;
            (uid, made.unwrap_or_else(|_| Err(PodApiError::Unanswered("the client panicked".to_owned()))))
        });
    }

    fn on_done(&mut self, uid: PodUid, result: Result<Answered, PodApiError>) {
        let Some(asked) = self.in_flight.remove(&uid) else { return };
        let told = self.told.entry(uid.clone()).or_default();
        let at = pod_ref(&asked.copy);
        match result {
            Ok(Answered::Pod(pod)) if pod.metadata.uid == asked.copy.metadata.uid => {
                told.answered(*pod);
                if let Some((version, made_at)) = asked.carries.filter(|(version, _)| *version > told.measured) {
                    told.measured = version;
                    let since = self.manager.clock.wall().duration_since(made_at).unwrap_or_default();
                    self.manager.metrics.pods.status_synced(since);
                    tracing::debug!(pod = %at, version, latency = ?since, "status sent");
                }
                // There may be a newer status by now, or the pod may go.
                self.queue.insert(uid);
            }
            Ok(Answered::Pod(_)) | Err(PodApiError::NotFound) => {
                told.denied(&asked.copy);
                tracing::debug!(pod = %at, "the API server has this pod no more");
                self.queue.extend(asked.again.then_some(uid));
            }
            Ok(Answered::Deleted) => {
                told.denied(&asked.copy);
                tracing::info!(pod = %at, "pod deleted from the API server");
            }
            Err(error) => {
                told.unsure |= !matches!(error, PodApiError::Refused(_));
                told.failures = told.failures.saturating_add(1);
                let wait = backoff::after(told.failures, fastrand::f64());
                tracing::warn!(pod = %at, %error, retry_in = ?wait, "status not sent");
                self.retrying.insert(uid.clone());
                self.retries.insert(uid, wait);
            }
        }
    }
}

async fn make(api: &dyn PodApi, at: &PodRef, request: Request) -> Result<Answered, PodApiError> {
    match request {
        Request::Get => api.get(at).await.map(|pod| Answered::Pod(Box::new(pod))),
        Request::Patch(patch) => api.patch_status(at, &patch).await.map(|pod| Answered::Pod(Box::new(pod))),
        Request::Delete => api.delete(at).await.map(|()| Answered::Deleted),
    }
}
