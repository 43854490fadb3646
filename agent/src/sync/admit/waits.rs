//! Conditions that pods wait for before they are decided on or started, and what follows when they are met.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;

use super::PodAdmission;
use super::ReadNode;
use super::SyncLoop;
use crate::model::Backoff;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::pleg::PlegHandle;
use crate::workers::state::Request;

/// Pauses between inspections of a pod that is about to be rejected, while the runtime fails, and their time limit.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const VIEW_LIMIT: Duration = Duration::from_secs(10);
/// How long the Node may take to be read for a pod that its known labels reject.
const NODE_READ_LIMIT: Duration = Duration::from_secs(10);
/// How long new pods of the API server wait for the first static pods after an agent start. A source of static pods may be
/// unreachable for good; files are read within milliseconds.
const STATIC_PODS_LIMIT: Duration = Duration::from_secs(2);

/// The wait for the first delivery of the sources of static pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StaticPods {
    /// No pod has had to wait yet.
    NotAwaited,
    /// Pods wait, and the time limit runs.
    Awaited,
    /// No pod waits any more.
    Over,
}

/// What a pod waits for, with the number of the wait: a pod that was removed and came back under its UID may wait for the
/// same again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sync) enum Wait {
    /// The static pods, which come first.
    StaticPods,
    /// The PLEG, which reports whether the pod runs.
    View(u64),
    /// The newest version of the Node.
    Node(u64),
    /// The end of pods that are evicted for it.
    Victims(u64),
}

/// A condition that pods have waited for is met.
#[derive(Debug)]
pub(in crate::sync) enum Awaited {
    /// The time to wait for static pods is over.
    StaticPods,
    /// The runtime runs this pod, or does not.
    View(PodUid, Wait, bool),
    /// The Node was read for this pod, or could not be read.
    Node(PodUid, Wait, Option<Arc<Node>>),
    /// Pods were evicted for this one.
    Preempted {
        /// The critical pod.
        uid: PodUid,
        /// Its wait for that.
        wait: Wait,
        /// All that were to be evicted.
        victims: Vec<PodUid>,
        /// What was missing first.
        resource: String,
        /// How many of them have ended.
        ended: usize,
    },
}

impl PodAdmission {
    /// Waits until the next condition that pods wait for is met. Cancel-safe.
    pub(in crate::sync) async fn awaited(&mut self) -> Awaited {
        loop {
            match self.tasks.join_next().await {
                Some(Ok(awaited)) => return awaited,
                // No task panics or is aborted before the loop ends.
                Some(Err(error)) => tracing::error!(%error, "a task of admission ended abnormally"),
                None => std::future::pending().await,
            }
        }
    }

    /// A pod that the runtime does not describe in time counts as running: a rejection could not be taken back.
    pub(super) fn await_view(&mut self, uid: &PodUid, pleg: &PlegHandle) {
        let wait = self.begin_wait(uid, Wait::View);
        let (uid, pleg) = (uid.clone(), pleg.clone());
        self.tasks.spawn(async move {
            let view = async {
                let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
                loop {
                    match pleg.view(&uid).await {
                        Ok(snapshot) => return runs(&snapshot),
                        Err(_) => tokio::time::sleep(backoff.failed(0.0)).await,
                    }
                }
            };
            let runs = tokio::time::timeout(VIEW_LIMIT, view).await.unwrap_or(true);
            Awaited::View(uid, wait, runs)
        });
    }

    pub(super) fn await_static_pods(&mut self, uid: &PodUid) {
        self.waiting.insert(uid.clone(), Wait::StaticPods);
        if self.static_pods == StaticPods::NotAwaited {
            self.static_pods = StaticPods::Awaited;
            self.tasks.spawn(async {
                tokio::time::sleep(STATIC_PODS_LIMIT).await;
                Awaited::StaticPods
            });
        }
    }

    pub(super) fn await_node(&mut self, uid: &PodUid, read: &ReadNode) {
        let wait = self.begin_wait(uid, Wait::Node);
        let (uid, reading) = (uid.clone(), read());
        self.tasks.spawn(async move {
            let node = tokio::time::timeout(NODE_READ_LIMIT, reading).await.ok().flatten();
            Awaited::Node(uid, wait, node)
        });
    }

    /// The pod waits from now on.
    pub(super) fn begin_wait(&mut self, uid: &PodUid, of_number: fn(u64) -> Wait) -> Wait {
        self.last_wait += 1;
        let wait = of_number(self.last_wait);
        self.waiting.insert(uid.clone(), wait);
        wait
    }

    /// Ends the pod's wait if it is this one. A pod that was removed and came back may wait for something else.
    fn end_wait(&mut self, uid: &PodUid, awaited: Wait) -> bool {
        self.waiting.get(uid) == Some(&awaited) && self.waiting.remove(uid).is_some()
    }
}

/// A container of the pod runs, or could be started at once.
pub(super) fn runs(snapshot: &PodSnapshot) -> bool {
    snapshot.running().next().is_some() || snapshot.sandboxes.iter().any(|sandbox| sandbox.ready)
}

impl SyncLoop {
    /// A new pod of the API server is decided on after the static pods of the node.
    pub(super) fn has_to_await_static_pods(&self, uid: &PodUid, pod: &Pod) -> bool {
        let is_new = !spec::is_static(pod) && self.is_resumed(uid, pod) != Some(true);
        is_new && self.admission.static_pods != StaticPods::Over && self.are_static_pods_missing()
    }

    fn are_static_pods_missing(&self) -> bool {
        self.sources.waiting_for().iter().any(|source| *source != ConfigSource::Api)
    }

    /// A source has delivered: ends the wait for static pods when all their sources have.
    pub(in crate::sync) fn on_source_seen(&mut self) {
        if self.admission.static_pods != StaticPods::Over && !self.are_static_pods_missing() {
            self.end_wait_for_static_pods();
        }
    }

    fn end_wait_for_static_pods(&mut self) {
        self.admission.static_pods = StaticPods::Over;
        self.decide_on_waiting(|wait| *wait == Wait::StaticPods);
    }

    /// A condition that pods have waited for is met.
    pub(in crate::sync) fn on_awaited(&mut self, awaited: Awaited) {
        match awaited {
            Awaited::StaticPods => self.end_wait_for_static_pods(),
            Awaited::View(uid, wait, runs) => {
                if self.admission.waiting.get(&uid) == Some(&wait) {
                    self.admission.viewed.insert(uid, runs);
                }
                // Others may have waited for a pod that was removed meanwhile.
                self.decide_on_viewed();
            }
            Awaited::Node(uid, wait, node) => {
                if self.admission.end_wait(&uid, wait) {
                    self.admission.fresh_nodes.insert(uid.clone(), node);
                    self.start_admitted(self.pods.by_uid(&uid));
                }
            }
            Awaited::Preempted { uid, wait, victims, resource, ended } => {
                (0..ended).for_each(|_| self.workers.preempted(&resource));
                victims.iter().for_each(|victim| _ = self.admission.preempted.remove(victim));
                if self.admission.end_wait(&uid, wait) {
                    if *self.requests.closed.borrow() {
                        // Upstream looks for a shutdown after its preemption: the pod is decided on again, and rejected.
                        self.admission.decisions.remove(&uid);
                    }
                    self.start_admitted(self.pods.by_uid(&uid));
                }
            }
        }
    }

    /// Decides on the pods that wait to be viewed when that is done for all of them: those that run come first.
    fn decide_on_viewed(&mut self) {
        let PodAdmission { waiting, viewed, .. } = &self.admission;
        let views = waiting.iter().filter(|(_, wait)| matches!(wait, Wait::View(_))).map(|(uid, _)| uid);
        if !views.clone().all(|uid| viewed.contains_key(uid)) {
            return;
        }
        self.decide_on_waiting(|wait| matches!(wait, Wait::View(_)));
    }

    fn decide_on_waiting(&mut self, is_awaited: fn(&Wait) -> bool) {
        let waiting = self.admission.waiting.extract_if(|_, wait| is_awaited(wait));
        let mut pods: Vec<Pod> = waiting.filter_map(|(uid, _)| self.pods.by_uid(&uid)).collect();
        self.sort_for_admission(&mut pods);
        self.start_admitted(pods);
    }

    /// Decides on pods that have waited, and starts those that are admitted. What was allocated to one before it had to wait
    /// may be less or more than it desires by now.
    fn start_admitted(&mut self, pods: impl IntoIterator<Item = Pod>) {
        let mut started = Vec::new();
        for pod in pods {
            let id = pod_ref(&pod);
            if !self.workers.contains(&id.uid) && self.admit(&pod) {
                self.workers.request(&id, Request::Create(pod.clone()));
                started.push(pod);
            }
        }
        // After all of them are decided on: a resize has the room that they leave.
        self.find_resizes(&started);
    }
}
