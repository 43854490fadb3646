//! The sync loop: desired pods and news of the runtime become requests to pod workers. Dispatches, decides nothing
//! about containers, never waits for the runtime.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::kill_requests::KillRequest;
use super::kill_requests::SyncRequests;
use super::kill_requests::bound_grace_period;
use super::mirrors::MirrorAction;
use super::mirrors::Mirrors;
use super::pods::is_mirror;
use super::shared::SharedPods;
use crate::model::Clock;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::PodUpdate;
use crate::model::pod_ref;
use crate::model::spec;
use crate::pleg::PlegHandle;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::sources::SourcesHandle;
use crate::sources::hostile;
use crate::startup::Startups;
use crate::status::Statuses;
use crate::workers::pod_workers::PodWorkers;
use crate::workers::refuse;
use crate::workers::refuse::Refusal;
use crate::workers::state::KillOptions;
use crate::workers::state::PodState;
use crate::workers::state::Request;
use crate::workers::state::is_terminal;

/// Housekeeping waits this long for more reasons, so that a burst costs one pass.
const HOUSEKEEPING_DELAY: Duration = Duration::from_millis(100);
/// While something was left to do (a failed removal, a source not ready), housekeeping runs again after this.
const HOUSEKEEPING_RETRY: Duration = Duration::from_secs(2);

/// The loop shows that it is alive at least this often.
const MAX_IDLE: Duration = Duration::from_secs(60);
/// How long workers may take to complete what they are doing when the agent ends.
const DRAIN: Duration = Duration::from_secs(5);

/// Why pods whose very paths are an attack are refused.
const INVALID_REASON: &str = "FailedValidation";
/// Why pods that come while the machine goes down are rejected.
const SHUTDOWN_REASON: &str = "NodeShutdown";
const SHUTDOWN_MESSAGE: &str = "Pod was rejected as the node is shutting down.";

/// Removes what pods that nobody knows any more have left on the node (directories, cgroups, logs). Implemented
/// by the rooms that made them; blocking calls belong into it, not into the loop.
pub trait Leftovers: Send + Sync + 'static {
    /// Starts removing the leftovers of every pod not in `keep`. Must not block. Returns false if it should be called
    /// again soon.
    fn sweep(&self, keep: &HashSet<PodUid>) -> bool;
}

/// Why the pod is not run at all.
fn refusal(pod: &ApiPod) -> Option<Refusal> {
    let hostile = hostile::content(pod).map(|problem| format!("Pod is invalid: {problem}"));
    let hostile = hostile.map(|message| Refusal { reason: INVALID_REASON, message });
    hostile.or_else(|| refuse::unsupported(pod))
}

/// What the sync loop works on.
pub struct SyncLoop {
    /// Desired pods.
    pub pods: SharedPods,
    /// Workers.
    pub workers: PodWorkers,
    /// News and the cache.
    pub pleg: PlegHandle,
    /// Which sources have spoken.
    pub sources: SourcesHandle,
    /// Published statuses.
    pub statuses: Statuses,
    /// Time.
    pub clock: Clock,
    /// Events.
    pub recorder: Recorder,
    /// The API's copies of static pods.
    pub mirrors: Mirrors,
    /// What other rooms ask for.
    pub requests: SyncRequests,
    /// Told of the API server's pods.
    pub startups: Startups,
    /// What dead pods leave.
    pub leftovers: Arc<dyn Leftovers>,
    /// When housekeeping is due.
    pub housekeeping: Option<Instant>,
}

impl SyncLoop {
    /// Runs until `shutdown`. Containers are left as they are.
    pub async fn run(mut self, mut updates: mpsc::Receiver<PodUpdate>, shutdown: CancellationToken) {
        let pleg = self.pleg.clone();
        let mut addresses = self.statuses.node_addresses();
        loop {
            let housekeeping = self.housekeeping;
            let due = async {
                match housekeeping {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            self.pods.record_iteration();
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = tokio::time::sleep(MAX_IDLE) => {}
                Some(update) = updates.recv() => self.on_update(update),
                uids = pleg.changed_pods() => self.on_pleg_change(uids),
                _ = self.workers.finished() => self.housekeep_soon(HOUSEKEEPING_DELAY),
                name = self.mirrors.changed() => self.reconcile_mirrors(name),
                Some(order) = self.requests.kills.recv() => self.kill(order),
                Ok(()) = addresses.changed() => self.workers.poke_all(),
                () = due => self.housekeeping_pass(),
            }
        }
        self.workers.stop(DRAIN).await;
    }

    fn on_update(&mut self, update: PodUpdate) {
        self.observe_starts(&update);
        let source = match update {
            PodUpdate::Add(source, mut pods) => {
                pods.sort_by(|a, b| a.metadata.creation_timestamp.cmp(&b.metadata.creation_timestamp));
                pods.into_iter().for_each(|pod| self.add(pod));
                source
            }
            PodUpdate::Update(source, pods) | PodUpdate::Delete(source, pods) => {
                pods.into_iter().for_each(|pod| self.update(pod));
                source
            }
            PodUpdate::Remove(source, pods) => {
                pods.iter().for_each(|pod| self.remove(pod));
                source
            }
            PodUpdate::Reconcile(source, pods) => {
                pods.into_iter().for_each(|pod| self.reconcile(pod));
                source
            }
        };
        self.seen(source);
    }

    /// Pods of the API server arrive as they are there: what starts take is measured by that.
    fn observe_starts(&self, update: &PodUpdate) {
        let now = self.clock.wall();
        match update {
            PodUpdate::Add(ConfigSource::Api, pods)
            | PodUpdate::Update(ConfigSource::Api, pods)
            | PodUpdate::Delete(ConfigSource::Api, pods)
            | PodUpdate::Reconcile(ConfigSource::Api, pods) => {
                pods.iter().filter(|pod| !is_mirror(pod)).for_each(|pod| self.startups.observed(pod, now));
            }
            PodUpdate::Remove(ConfigSource::Api, pods) => {
                pods.iter().for_each(|pod| self.startups.gone(&pod_ref(pod).uid));
            }
            _ => {}
        }
    }

    fn seen(&mut self, source: ConfigSource) {
        let before = self.sources.all_ready();
        let unheard = source == ConfigSource::Api && self.sources.waiting_for().contains(&source);
        self.sources.mark_seen(source);
        if unheard {
            self.reconcile_mirrors(None);
        }
        if !before && self.sources.all_ready() {
            self.housekeep_soon(HOUSEKEEPING_DELAY);
        }
    }

    fn add(&mut self, pod: Pod) {
        self.pods.set(pod.clone());
        if is_mirror(&pod) {
            return self.on_mirror(&pod);
        }
        let id = pod_ref(&pod);
        if is_terminal(&pod) && !self.workers.knows(&id.uid) && !self.runs(&id.uid) {
            self.workers.start(PodState::already_terminated(id, pod.clone(), Instant::now()));
        } else if !self.reject_unsupported(&pod) && !self.reject_at_shutdown(&pod) {
            self.workers.request(&id, Request::Create(pod.clone()));
        }
        self.reconcile_mirror_of(&pod);
    }

    /// A pod that needs what this agent lacks is refused whole, never half-run. One that is over or to be deleted is not
    /// refused its end.
    fn reject_unsupported(&mut self, pod: &Pod) -> bool {
        if spec::deletion_requested(pod) || is_terminal(pod) {
            return false;
        }
        let Some(refusal) = refusal(pod) else { return false };
        let uid = pod_ref(pod).uid;
        if self.statuses.get(&uid).is_none() {
            self.recorder.pod_event(pod, "", EventType::Warning, refusal.reason, &refusal.message);
            self.workers.rejected(refusal.reason);
        }
        self.statuses.reject(pod, refusal.reason, &refusal.message, self.runs(&uid), self.clock.wall());
        true
    }

    /// No pod begins on a machine that goes down. One that was there before keeps what it has.
    fn reject_at_shutdown(&mut self, pod: &Pod) -> bool {
        let uid = pod_ref(pod).uid;
        if !*self.requests.closed.borrow() || spec::deletion_requested(pod) || self.workers.knows(&uid) {
            return false;
        }
        self.recorder.pod_event(pod, "", EventType::Warning, SHUTDOWN_REASON, SHUTDOWN_MESSAGE);
        self.workers.rejected(SHUTDOWN_REASON);
        self.statuses.reject(pod, SHUTDOWN_REASON, SHUTDOWN_MESSAGE, self.runs(&uid), self.clock.wall());
        true
    }

    /// A pod is ended although its sources want it.
    fn kill(&mut self, order: KillRequest) {
        let known = self.pods.by_uid(&order.uid).filter(|_| self.workers.knows(&order.uid));
        match known {
            Some(pod) => {
                bound_grace_period(&pod, &order.options, &self.recorder);
                self.workers.request(&pod_ref(&pod), Request::Kill(order.options));
            }
            None => order.options.finished.iter().for_each(CancellationToken::cancel),
        }
    }

    /// It was rejected when it came, and nothing was begun since.
    fn was_rejected(&self, uid: &PodUid) -> bool {
        self.statuses.get(uid).is_some_and(|status| status.reason.as_deref() == Some(SHUTDOWN_REASON))
    }

    /// Something of the pod may run, as far as known.
    fn runs(&self, uid: &PodUid) -> bool {
        self.pleg.cached(uid).is_none_or(|s| s.running().next().is_some() || s.sandboxes.iter().any(|s| s.ready))
    }

    fn update(&mut self, pod: Pod) {
        let (pod, problem) = self.harmless(pod);
        if let Some(problem) = problem {
            let message = format!("Pod is invalid: {problem}; it goes on as it was");
            self.recorder.pod_event(&pod, "", EventType::Warning, INVALID_REASON, &message);
        }
        self.pods.set(pod.clone());
        if is_mirror(&pod) {
            return self.on_mirror(&pod);
        }
        let id = pod_ref(&pod);
        if self.workers.knows(&id.uid) || !self.reject_unsupported(&pod) {
            self.workers.request(&id, Request::Update(pod.clone()));
        }
        // A deletion may be all that was missing for the last call about this pod.
        self.statuses.request_sync(&id.uid);
        self.reconcile_mirror_of(&pod);
    }

    /// What is to be made of a pod that has changed, and what is wrong with the change. A pod that was taken for good is
    /// not ended for what somebody writes into it later: it keeps the spec it has, and what the object says of its end,
    /// labels and status counts.
    fn harmless(&self, pod: Pod) -> (Pod, Option<String>) {
        let Some(problem) = hostile::content(&pod) else { return (pod, None) };
        match self.pods.by_uid(&pod_ref(&pod).uid).filter(|known| hostile::content(known).is_none()) {
            Some(known) => (Arc::new(ApiPod { spec: known.spec.clone(), ..ApiPod::clone(&pod) }), Some(problem)),
            // It was refused as it came.
            None => (pod, None),
        }
    }

    /// Only the API status is another: news for what is decided next, and for the pod's readiness gates.
    fn reconcile(&mut self, pod: Pod) {
        let (pod, _) = self.harmless(pod);
        self.pods.set(pod.clone());
        if is_mirror(&pod) {
            return;
        }
        let uid = pod_ref(&pod).uid;
        let gated = pod.spec.as_ref().is_some_and(|spec| spec.readiness_gates.iter().flatten().next().is_some());
        self.workers.refresh(pod);
        if gated {
            self.workers.poke(&uid);
        }
    }

    fn remove(&mut self, pod: &Pod) {
        let id = pod_ref(pod);
        self.pods.remove(pod);
        if is_mirror(pod) {
            self.mirrors.removed(pod);
            return self.on_mirror(pod);
        }
        self.workers.request(&id, Request::Kill(KillOptions::default()));
        self.housekeep_soon(HOUSEKEEPING_DELAY);
        self.reconcile_mirror_of(pod);
    }

    /// A mirror pod has come, changed or gone. It never concerns the containers of its static pod.
    fn on_mirror(&mut self, mirror: &Pod) {
        let name = pod_ref(mirror).full_name();
        if let (Some(pod), _) = self.pods.named(&name) {
            self.statuses.request_sync(&pod_ref(&pod).uid);
        }
        self.reconcile_mirror(&name);
    }

    fn reconcile_mirror_of(&mut self, pod: &Pod) {
        if spec::is_static(pod) {
            self.reconcile_mirror(&pod_ref(pod).full_name());
        }
    }

    fn reconcile_mirror(&mut self, full_name: &str) {
        if self.sources.waiting_for().contains(&ConfigSource::Api) {
            // Nobody knows yet which mirror pods there are.
            return;
        }
        let (pod, mirror) = self.pods.named(full_name);
        let pod = pod.filter(|pod| spec::is_static(pod));
        let ending = |pod: &Pod| self.workers.ending(&pod_ref(pod).uid);
        let action = match pod {
            Some(pod) if !ending(&pod) => MirrorAction::Ensure(pod),
            Some(_) => MirrorAction::Keep,
            None if self.workers.is_terminating(full_name) || !self.sources.all_ready() => MirrorAction::Keep,
            None => MirrorAction::Delete,
        };
        self.mirrors.reconcile(full_name, &action, mirror.as_ref());
    }

    /// Looks at one mirror pod, or at all of them and all static pods.
    fn reconcile_mirrors(&mut self, full_name: Option<String>) {
        let names: HashSet<String> = match full_name {
            Some(name) => [name].into(),
            None => {
                let pods = self.pods.all().into_iter().filter(|pod| spec::is_static(pod));
                pods.chain(self.pods.mirrors()).map(|pod| pod_ref(&pod).full_name()).collect()
            }
        };
        for name in names {
            self.reconcile_mirror(&name);
        }
    }

    fn on_pleg_change(&mut self, news: Vec<PodUid>) {
        for uid in news {
            if self.workers.knows(&uid) {
                self.workers.poke(&uid);
            }
            if self.pods.by_uid(&uid).is_none() {
                self.housekeep_soon(HOUSEKEEPING_DELAY);
            }
        }
    }

    fn housekeep_soon(&mut self, delay: Duration) {
        let at = Instant::now() + delay;
        self.housekeeping = Some(self.housekeeping.map_or(at, |due| due.min(at)));
    }

    /// Ends what nobody desires, starts anew what was asked for again, sweeps leftovers. Does nothing before every
    /// source has spoken: until then no pod is known to be undesired.
    fn housekeeping_pass(&mut self) {
        self.housekeeping = None;
        if !self.sources.all_ready() {
            return;
        }
        let pods = self.pods.all();
        let desired: HashSet<PodUid> = pods.iter().map(|pod| pod_ref(pod).uid).collect();
        let known = self.workers.sync_known(&desired);
        for pod in pods {
            let id = pod_ref(&pod);
            let unwanted = refusal(&pod).is_some() || self.was_rejected(&id.uid);
            let refused = unwanted && !spec::deletion_requested(&pod);
            let lost = !self.workers.knows(&id.uid) && !refused;
            if known.restart.contains(&id.uid) || lost {
                self.workers.request(&id, Request::Create(pod));
            } else if refused && !self.runs(&id.uid) {
                self.statuses.stopped(&id.uid, self.clock.wall());
            }
        }
        for snapshot in self.pleg.all() {
            self.end_if_unknown(&desired, &snapshot);
        }
        let mut keep = desired;
        keep.extend(self.pleg.all().iter().map(|s| s.pod.uid.clone()));
        keep.extend(self.workers.uids());
        self.statuses.retain(&keep);
        self.reconcile_mirrors(None);
        if !self.leftovers.sweep(&keep) {
            self.housekeep_soon(HOUSEKEEPING_RETRY);
        }
    }

    /// A pod of the runtime that no source desires and no worker looks after is ended, and its remains are removed.
    fn end_if_unknown(&mut self, desired: &HashSet<PodUid>, snapshot: &PodSnapshot) {
        let uid = &snapshot.pod.uid;
        let nothing = snapshot.containers.is_empty() && snapshot.sandboxes.is_empty();
        if nothing || self.workers.knows(uid) {
            return;
        }
        let rejected = desired.contains(uid) && snapshot.running().next().is_some();
        if rejected || !desired.contains(uid) {
            tracing::info!(pod = %snapshot.pod, "ending a pod that no source desires");
            self.workers.request(&snapshot.pod, Request::KillRuntimeOnly);
        }
    }
}
