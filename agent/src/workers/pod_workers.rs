//! All workers: starts one per pod UID, passes requests on, and terminates pods that are no longer desired.
//!
//! Owned by the sync loop, which makes all requests.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::mailbox::Mailbox;
use super::registry::WorkerRegistry;
use super::state::KillOptions;
use super::state::Phase;
use super::state::PodState;
use super::state::Reaction;
use super::state::Request;
use super::worker::Worker;
use super::worker::WorkerContext;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::retry::Operation;

/// The workers of all pods.
pub struct PodWorkers {
    context: Arc<WorkerContext>,
    registry: WorkerRegistry,
    tasks: JoinSet<PodUid>,
}

/// What housekeeping found.
#[derive(Debug, Default, PartialEq)]
pub struct PodsToRestart {
    /// Pods that are desired again under the same UID after their end, and can be started now.
    pub restart: Vec<PodUid>,
}

impl PodWorkers {
    /// No workers yet; `registry` will have those to come.
    pub fn new(context: Arc<WorkerContext>, registry: WorkerRegistry) -> Self {
        Self { context, registry, tasks: JoinSet::new() }
    }

    /// A pod was rejected at admission.
    pub fn rejected(&self, reason: &str) {
        self.context.observer.rejected(reason);
    }

    /// A pod was evicted in favour of a critical one that lacked this resource.
    pub fn preempted(&self, resource: &str) {
        self.context.observer.preempted(resource);
    }

    /// The runtime runs a pod that no source desires and that has no worker.
    pub fn orphaned(&self) {
        self.context.observer.orphaned();
    }

    /// No container of the pod runs any more. False for a pod without worker.
    pub fn has_ended(&self, uid: &PodUid) -> bool {
        self.registry.lock().get(uid).is_some_and(|mailbox| mailbox.state().phase() >= Phase::Terminated)
    }

    /// Hands a request to the pod's worker, starting one if there is none. Updates and syncs of unknown pods are
    /// dropped: a worker begins with a creation or a kill.
    pub fn request(&mut self, pod: &PodRef, request: Request) {
        let request = self.with_allocated_form(request);
        let termination = self.termination_on(&request);
        if !self.contains(&pod.uid) {
            if matches!(request, Request::Sync) {
                return;
            }
            self.start(PodState::new(pod.clone()));
        }
        if let Some(mailbox) = self.registry.lock().get(&pod.uid) {
            let mut state = mailbox.state();
            let mut reaction = state.request(request);
            if let Some(options) = termination {
                // Before the worker can take the creation.
                let kill = state.request(Request::Kill(options));
                reaction = Reaction { wake: reaction.wake || kill.wake, cancel: reaction.cancel || kill.cancel };
            }
            drop(state);
            mailbox.react(reaction);
        }
    }

    /// How a pod that is created is to be terminated at once, if that was decided before. A static pod is started by every
    /// agent again.
    fn termination_on(&self, request: &Request) -> Option<KillOptions> {
        match request {
            Request::Create(pod) if !spec::is_static(pod) => self.registry.take_termination(&pod_ref(pod).uid),
            _ => None,
        }
    }

    /// Workers get what is allocated to their pods, not what these desire.
    fn with_allocated_form(&self, request: Request) -> Request {
        let allocations = &self.context.act.allocations;
        match request {
            Request::Create(pod) => Request::Create(allocations.allocated_form(pod)),
            Request::Update(pod) => Request::Update(allocations.allocated_form(pod)),
            other => other,
        }
    }

    /// Terminates a pod that runs without worker, since it was rejected, with its own grace period.
    pub fn terminate_unmanaged(&mut self, pod: Pod, options: KillOptions) {
        let mut state = PodState::new(pod_ref(&pod));
        if spec::is_static(&pod) {
            // Its successor waits until it has ended: both use the same ports and files.
            self.context.static_pod_starts.enqueue(&state.pod_ref.full_name(), &state.pod_ref.uid);
        }
        state.pod = Some(pod);
        // Its containers run: it does not wait for another pod of its name.
        state.start();
        state.request(Request::Kill(options));
        self.start(state);
    }

    /// When the removal of what is left of a pod is retried; `None` if it may be tried now.
    pub fn removal_due(&self, pod: &PodRef) -> Option<Instant> {
        self.context.retries.due(Operation::RemovePod, &pod.with_uid())
    }

    /// The pod has changed in the runtime.
    pub fn request_sync(&mut self, uid: &PodUid) {
        self.registry.request_sync(uid);
    }

    /// Something that concerns every pod has changed.
    pub fn request_sync_of_all(&mut self) {
        for mailbox in self.registry.lock().values() {
            let reaction = mailbox.state().request(Request::Sync);
            mailbox.react(reaction);
        }
    }

    /// The pod's API status is another one: stored for the next pass, which it does not start.
    pub fn refresh(&mut self, pod: Pod) {
        if let Some(mailbox) = self.registry.lock().get(pod.metadata.uid.as_deref().unwrap_or_default()) {
            mailbox.state().refresh(self.context.act.allocations.allocated_form(pod));
        }
    }

    /// The pod's termination was requested, or has completed.
    pub fn termination_requested(&self, uid: &PodUid) -> bool {
        self.registry.lock().get(uid).is_some_and(|mailbox| mailbox.state().termination_requested())
    }

    /// Full names (`name_namespace`) of pods that were started and are being stopped.
    pub fn terminating_names(&self) -> HashSet<String> {
        self.registry.terminating_names()
    }

    /// Starts a worker with a given state (a terminal pod that only needs cleaning up).
    pub fn start(&mut self, state: PodState) {
        let uid = state.pod_ref.uid.clone();
        let mailbox = Mailbox::new(state);
        self.registry.lock().insert(uid.clone(), mailbox.clone());
        let worker = Worker::new(mailbox, self.context.clone());
        self.tasks.spawn(async move {
            worker.run().await;
            uid
        });
    }

    /// Waits until a worker has finished its pod, and returns its UID; `None` if a worker ended abnormally (panic). Then the
    /// pod's state is lost with it, and housekeeping starts another worker from the desired pod and its running containers.
    /// Cancel-safe.
    pub async fn finished(&mut self) -> Option<PodUid> {
        match self.tasks.join_next().await {
            Some(Ok(uid)) => Some(uid),
            Some(Err(error)) => {
                tracing::error!(%error, "a pod worker ended abnormally");
                self.registry.lock().retain(|_, mailbox| {
                    let finished = mailbox.state().phase() == Phase::Finished;
                    finished || Arc::strong_count(mailbox) > 1
                });
                None
            }
            None => std::future::pending().await,
        }
    }

    /// Reconciles all known UIDs with the desired ones: removes finished workers whose pod is not desired or was created
    /// again, and terminates orphans.
    pub fn sync_known(&mut self, desired: &HashSet<PodUid>) -> PodsToRestart {
        let mut known = PodsToRestart::default();
        self.registry.lock().retain(|uid, mailbox| {
            let mut state = mailbox.state();
            let wanted = desired.contains(uid);
            if wanted && !state.restart_requested() {
                return true;
            }
            if state.phase() == Phase::Finished {
                if wanted {
                    let fixed = state.pod.as_ref().is_some_and(|pod| spec::is_static(pod));
                    self.context.observer.restarted(fixed);
                    known.restart.push(uid.clone());
                }
                return false;
            }
            if !wanted && !state.termination_requested() {
                let reaction = state.orphaned();
                drop(state);
                mailbox.react(reaction);
            }
            true
        });
        known
    }

    /// True if there is a worker (also a finished one) for this UID.
    pub fn contains(&self, uid: &PodUid) -> bool {
        self.registry.lock().contains_key(uid)
    }

    /// Other static pods may have the full names of those that are not in `kept`.
    pub fn release_names(&self, kept: &HashSet<PodUid>) {
        self.context.static_pod_starts.retain(kept);
    }

    /// Every UID there is a worker for.
    pub fn uids(&self) -> Vec<PodUid> {
        self.registry.lock().keys().cloned().collect()
    }

    /// Ends all workers: what they are doing is completed within `grace`, then they are dropped. Containers are left
    /// as they are.
    pub async fn stop(mut self, grace: Duration) {
        self.context.shutdown.cancel();
        let rest = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(grace, rest).await.is_err() {
            tracing::warn!(
                workers = self.tasks.len(),
                "workers did not finish in time; the next start continues with their pods"
            );
        }
        self.tasks.shutdown().await;
    }
}
