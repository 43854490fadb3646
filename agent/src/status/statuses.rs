//! Thread-safe access to the status cache for workers, servers and the status manager.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::api::core::v1::ResourceRequirements;
use tokio::sync::watch;

use super::ApiCopies;
use super::ApiStatusView;
use super::NodeAddresses;
use super::ResizeView;
use super::StatusInput;
use super::StatusStore;
use super::Stored;
use super::TerminationReason;
use super::conditions;
use super::generate;
use super::phase;
use super::readiness;
use super::rejection;
use super::termination_reason::with_termination_reason;
use crate::model;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::ProbeResults;
use crate::model::StartFailure;
use crate::model::pod_ref;
use crate::model::qos;
use crate::model::restart::RestartGates;
use crate::model::spec;

/// Published pod statuses. Cheap to clone; no call blocks for longer than it takes to generate one status.
#[derive(Clone)]
pub struct Statuses {
    store: Arc<Mutex<StatusStore>>,
    context: Arc<NodeContext>,
    /// `None` without an API server (standalone).
    api: Option<Arc<ApiStatusView>>,
}

struct NodeContext {
    runtime_type: String,
    node: watch::Receiver<NodeAddresses>,
    gates: RestartGates,
}

/// What a pod worker contributes to the status besides spec and snapshot.
#[derive(Clone)]
pub struct PodObservations<'a> {
    /// Last start failure by container name (upstream: reason cache).
    pub reasons: &'a HashMap<String, StartFailure>,
    /// QoS class computed from the spec.
    pub qos_class: &'a str,
    /// Requests and limits of the whole pod; `None` if a quantity cannot be read, or the status is not to have them.
    pub resources: Option<ResourceRequirements>,
    /// How far resizes of the pod are.
    pub resize: ResizeView<'a>,
    /// The pod's runtime handler supports recursive read-only mounts (KEP-3857).
    pub recursive_read_only: bool,
    /// The signals that stop containers are reported (KEP-4960).
    pub stop_signals: bool,
    /// All containers are stopped and will not be restarted.
    pub is_terminal: bool,
    /// Results of the pod's probes.
    pub probes: Option<&'a ProbeResults>,
    /// Why the agent terminates the pod, if it does.
    pub termination: Option<&'a TerminationReason>,
}

impl Statuses {
    /// An empty cache. `runtime_type` is the part of container ids before `://`; `node` carries the node's addresses, empty
    /// while unknown.
    pub fn new(runtime_type: String, node: watch::Receiver<NodeAddresses>, gates: RestartGates) -> Self {
        let context = NodeContext { runtime_type, node, gates };
        Self { store: Arc::new(Mutex::new(StatusStore::new(gates))), context: Arc::new(context), api: None }
    }

    /// Adds an API server to keep in sync. Call it before cloning.
    #[must_use]
    pub fn with_api(self, copies: Arc<dyn ApiCopies>) -> Self {
        Self { api: Some(Arc::new(ApiStatusView::new(copies))), ..self }
    }

    /// What the status manager works on; `None` without an API server.
    pub fn api_view(&self) -> Option<Arc<ApiStatusView>> {
        self.api.clone()
    }

    /// The node's addresses (`status.hostIPs`).
    pub fn node_addresses(&self) -> watch::Receiver<NodeAddresses> {
        self.context.node.clone()
    }

    fn store(&self) -> MutexGuard<'_, StatusStore> {
        // The store replaces entries whole: a panic elsewhere cannot leave one half-written.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mirror pod of a static pod: its status survives restarts of the agent.
    fn mirror(&self, pod: &Pod) -> Option<model::Pod> {
        let api = self.api.as_ref().filter(|_| spec::is_static(pod))?;
        api.copies.api_copy(&pod_ref(pod).uid)
    }

    /// Makes the status manager compare this pod's status with its API copy, because either changed.
    pub fn request_sync(&self, uid: &PodUid) {
        if let Some(api) = &self.api {
            api.changes.mark(uid.clone());
        }
    }

    /// Computes and publishes the status of the pod as of snapshot `view`. Returns true if the phase is now Failed or Succeeded.
    pub fn publish(&self, pod: &Pod, view: &PodSnapshot, observations: PodObservations<'_>, now: SystemTime) -> bool {
        let uid = pod_ref(pod).uid;
        let mirror = self.mirror(pod);
        let node = self.context.node.borrow().clone();
        let mut store = self.store();
        let nothing = PodStatus::default();
        let old = store.basis(uid.as_str(), pod, None).unwrap_or(&nothing);
        let status = generate(&StatusInput {
            pod,
            snapshot: view,
            old,
            reasons: observations.reasons,
            probes: observations.probes,
            qos_class: observations.qos_class,
            resources: observations.resources.as_ref(),
            resize: observations.resize,
            recursive_read_only: observations.recursive_read_only,
            stop_signals: observations.stop_signals,
            is_terminal: observations.is_terminal,
            runtime_type: &self.context.runtime_type,
            node: &node,
            gates: self.context.gates,
            now,
        });
        let terminal = status.phase.as_deref().is_some_and(phase::is_terminal);
        let status = match observations.termination {
            Some(reason) => with_termination_reason(status, reason, pod.metadata.generation),
            None => status,
        };
        let set = store.set(&uid, pod, mirror.as_deref(), status, now);
        let stopped = store.set_may_run(uid.as_str(), !observations.is_terminal, now);
        drop(store);
        self.request_sync_if_changed(pod, set, stopped);
        terminal
    }

    /// Publishes that the pod was rejected at admission. The runtime has nothing of it.
    pub fn reject(&self, pod: &Pod, reason: &str, message: &str, now: SystemTime) {
        let status = PodStatus {
            qos_class: qos::qos_class(pod).ok().map(|class| class.as_str().to_owned()),
            observed_generation: pod.metadata.generation,
            ..rejection::rejected(PodStatus::default(), reason, message)
        };
        let (uid, mirror) = (pod_ref(pod).uid, self.mirror(pod));
        let mut store = self.store();
        let set = store.set(&uid, pod, mirror.as_deref(), status, now);
        let stopped = store.set_may_run(uid.as_str(), false, now);
        drop(store);
        self.request_sync_if_changed(pod, set, stopped);
    }

    /// As [`Self::reject`], for a pod whose containers have ended: it keeps the rest of its status until the worker that
    /// releases what it has publishes how they ended.
    pub fn reject_ended(&self, pod: &Pod, reason: &str, message: &str, now: SystemTime) {
        self.modify(pod, |status| rejection::rejected(status, reason, message), now);
    }

    /// The pod is rejected although containers of it run: its status stays as it is at the API server, whatever others,
    /// such as the node controller, write into it meanwhile. A pod without a status gets none.
    pub fn keep(&self, pod: &Pod, now: SystemTime) {
        let has_status = if spec::is_static(pod) {
            // A status in the manifest does not count: that of the mirror pod is the pod's.
            let reported = || self.mirror(pod).is_some_and(|mirror| mirror.status.is_some());
            self.stored(&pod_ref(pod).uid).is_some() || reported()
        } else {
            self.last_known(pod).is_some()
        };
        if !has_status {
            return;
        }
        self.modify(pod, rejection::without_unmanaged, now);
        self.store().set_may_run(pod_ref(pod).uid.as_str(), true, now);
    }

    /// Changes the cached status of a pod.
    pub(super) fn modify(&self, pod: &Pod, change: impl FnOnce(PodStatus) -> PodStatus, now: SystemTime) {
        let (uid, mirror) = (pod_ref(pod).uid, self.mirror(pod));
        let mut store = self.store();
        let status = store.basis(uid.as_str(), pod, mirror.as_deref()).cloned().unwrap_or_default();
        let set = store.set(&uid, pod, mirror.as_deref(), change(status), now);
        drop(store);
        self.request_sync_if_changed(pod, set, false);
    }

    /// Updates started, ready and the conditions that depend on them after a change of the pod's probe results. Does not wait
    /// for the pod's worker, which may be busy.
    pub fn set_probe_results(&self, pod: &Pod, snapshot: &PodSnapshot, probes: &ProbeResults, now: SystemTime) {
        if self.store().get(pod_ref(pod).uid.as_str()).is_none() {
            return;
        }
        let change = |mut status| {
            readiness::set_started_and_ready(pod, snapshot, Some(probes), &mut status);
            conditions::update_readiness(pod, &mut status);
            status
        };
        self.modify(pod, change, now);
    }

    /// No container of the pod can run any more.
    pub fn stopped(&self, uid: &PodUid, now: SystemTime) {
        if self.store().set_may_run(uid.as_str(), false, now) {
            self.request_sync(uid);
        }
    }

    /// Publishes the final status of the pod.
    pub fn terminate(&self, pod: &Pod, now: SystemTime) {
        let (uid, mirror) = (pod_ref(pod).uid, self.mirror(pod));
        let set = self.store().terminate_pod(&uid, pod, mirror.as_deref(), now);
        self.request_sync_if_changed(pod, set, false);
    }

    fn request_sync_if_changed(&self, pod: &Pod, set: Result<bool, super::IllegalTransition>, stopped: bool) {
        let changed = set.unwrap_or_else(|error| {
            tracing::warn!(pod = %pod_ref(pod), %error, "status update rejected");
            false
        });
        if changed || stopped {
            self.request_sync(&pod_ref(pod).uid);
        }
    }

    /// Removes every pod that is not in `known`.
    pub fn retain(&self, known: &HashSet<PodUid>) {
        self.store().retain(|uid| known.contains(uid));
    }

    /// UIDs of all pods with a status, in no order.
    pub fn uids(&self) -> Vec<PodUid> {
        self.store().iter().map(|(uid, _)| uid.clone()).collect()
    }

    /// The cached status of a pod with its version and flags. Copies nothing of the status.
    pub fn stored(&self, uid: &PodUid) -> Option<Stored> {
        self.store().get(uid.as_str()).cloned()
    }

    /// A copy of the cached status of a pod.
    pub fn get(&self, uid: &PodUid) -> Option<PodStatus> {
        self.stored(uid).map(|stored| PodStatus::clone(&stored.status))
    }

    /// The last known status of a pod: the cached one, else its API object's, which an earlier agent may have sent.
    pub fn last_known(&self, pod: &Pod) -> Option<PodStatus> {
        let (uid, mirror) = (pod_ref(pod).uid, self.mirror(pod));
        self.store().basis(uid.as_str(), pod, mirror.as_deref()).cloned()
    }

    /// The pod's primary address, once it is known.
    pub fn pod_ip(&self, uid: &PodUid) -> Option<String> {
        self.store().get(uid.as_str()).and_then(|stored| stored.status.pod_ip.clone())
    }

    /// In the last status all containers are being restarted (KEP-5532).
    pub fn restarting_all(&self, uid: &PodUid) -> bool {
        self.store().get(uid.as_str()).is_some_and(|stored| {
            let mut all = stored.status.conditions.iter().flatten();
            all.any(|c| c.type_ == conditions::ALL_CONTAINERS_RESTARTING && c.status == "True")
        })
    }

    /// When `activeDeadlineSeconds` will have passed, if the pod has such a limit and has started.
    pub fn active_deadline(&self, pod: &Pod) -> Option<SystemTime> {
        let seconds = pod.spec.as_ref()?.active_deadline_seconds?;
        let started = self.stored(&pod_ref(pod).uid)?.status.start_time.clone()?;
        let started = Duration::from_nanos(u64::try_from(started.0.as_nanosecond()).ok()?);
        SystemTime::UNIX_EPOCH.checked_add(started + Duration::from_secs(u64::try_from(seconds).ok()?))
    }
}
