//! The status store as workers, servers and the status manager share it: one lock, short calls.

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
use tokio::sync::watch;

use super::ApiCopies;
use super::ApiSide;
use super::NodeAddresses;
use super::StatusInput;
use super::StatusStore;
use super::Stored;
use super::conditions;
use super::generate;
use super::phase;
use crate::model;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::StartFailure;
use crate::model::pod_ref;
use crate::model::restart::RestartGates;
use crate::model::spec;

/// Published statuses. Cheap to clone; no call blocks for longer than it takes to generate one status.
#[derive(Clone)]
pub struct Statuses {
    store: Arc<Mutex<StatusStore>>,
    about: Arc<About>,
    /// `None` when standalone: then nobody is told, and nobody else knows the pods.
    api: Option<Arc<ApiSide>>,
}

struct About {
    runtime_type: String,
    node: watch::Receiver<NodeAddresses>,
    gates: RestartGates,
}

/// What a worker knows of its pod beyond spec and snapshot.
#[derive(Clone, Copy)]
pub struct Knowledge<'a> {
    /// Last failed start by container name.
    pub reasons: &'a HashMap<String, StartFailure>,
    /// QoS class by the spec.
    pub qos_class: &'a str,
    /// All containers are stopped for good.
    pub is_terminal: bool,
}

impl Statuses {
    /// An empty board. `runtime_type` is the part of container ids before `://`; `node` tells the node's addresses, none
    /// while they are unknown.
    pub fn new(runtime_type: String, node: watch::Receiver<NodeAddresses>, gates: RestartGates) -> Self {
        let about = About { runtime_type, node, gates };
        Self { store: Arc::new(Mutex::new(StatusStore::new(gates))), about: Arc::new(about), api: None }
    }

    /// The same board with an API server to tell. To be called before it is cloned.
    #[must_use]
    pub fn telling(self, copies: Arc<dyn ApiCopies>) -> Self {
        Self { api: Some(Arc::new(ApiSide::new(copies))), ..self }
    }

    /// What the status manager works on; `None` when standalone.
    pub fn api_side(&self) -> Option<Arc<ApiSide>> {
        self.api.clone()
    }

    /// The node's addresses, which every pod's status shows.
    pub fn node_addresses(&self) -> watch::Receiver<NodeAddresses> {
        self.about.node.clone()
    }

    fn store(&self) -> MutexGuard<'_, StatusStore> {
        // The store replaces entries whole: a panic elsewhere cannot leave one half-written.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The API's copy of a static pod: it has seen earlier lives of the agent.
    fn mirror(&self, pod: &Pod) -> Option<model::Pod> {
        let side = self.api.as_ref().filter(|_| spec::is_static(pod))?;
        side.copies.api_copy(&pod_ref(pod).uid)
    }

    /// The API's copy of this pod has changed, or it has one now: what is said of it is to be compared again.
    pub fn compare(&self, uid: &PodUid) {
        if let Some(side) = &self.api {
            side.changes.mark(uid.clone());
        }
    }

    /// Publishes what `view` says of the pod. Returns true if the phase is now Failed or Succeeded.
    pub fn publish(&self, pod: &Pod, view: &PodSnapshot, knowledge: Knowledge<'_>, now: SystemTime) -> bool {
        let uid = pod_ref(pod).uid;
        let mirror = self.mirror(pod);
        let node = self.about.node.borrow().clone();
        let mut store = self.store();
        let old = store.basis(uid.as_str(), pod, None).cloned().unwrap_or_default();
        let status = generate(&StatusInput {
            pod,
            snapshot: view,
            old: &old,
            reasons: knowledge.reasons,
            qos_class: knowledge.qos_class,
            is_terminal: knowledge.is_terminal,
            runtime_type: &self.about.runtime_type,
            node: Some(&node),
            gates: self.about.gates,
            now,
        });
        let terminal = status.phase.as_deref().is_some_and(phase::is_terminal);
        let set = store.set(&uid, pod, mirror.as_deref(), status, now);
        let stopped = store.set_may_run(uid.as_str(), !knowledge.is_terminal, now);
        drop(store);
        self.tell(pod, set, stopped);
        terminal
    }

    /// The pod is refused or rejected before anything of it ran in this life of the agent; `may_run` if something of it
    /// is left from before.
    pub fn reject(&self, pod: &Pod, reason: &str, message: &str, may_run: bool, now: SystemTime) {
        let status = PodStatus {
            phase: Some("Failed".to_owned()),
            reason: Some(reason.to_owned()),
            message: Some(format!("Pod was rejected: {message}")),
            qos_class: pod.status.as_ref().and_then(|status| status.qos_class.clone()),
            observed_generation: pod.metadata.generation,
            ..PodStatus::default()
        };
        let (uid, mirror) = (pod_ref(pod).uid, self.mirror(pod));
        let mut store = self.store();
        let set = store.set(&uid, pod, mirror.as_deref(), status, now);
        let stopped = store.set_may_run(uid.as_str(), may_run, now);
        drop(store);
        self.tell(pod, set, stopped);
    }

    /// Changes what was last said of a pod.
    pub(super) fn amend(&self, pod: &Pod, change: impl FnOnce(PodStatus) -> PodStatus, now: SystemTime) {
        let (uid, mirror) = (pod_ref(pod).uid, self.mirror(pod));
        let mut store = self.store();
        let status = store.basis(uid.as_str(), pod, mirror.as_deref()).cloned().unwrap_or_default();
        let set = store.set(&uid, pod, mirror.as_deref(), change(status), now);
        drop(store);
        self.tell(pod, set, false);
    }

    /// Nothing of the pod can run any more.
    pub fn stopped(&self, uid: &PodUid, now: SystemTime) {
        if self.store().set_may_run(uid.as_str(), false, now) {
            self.compare(uid);
        }
    }

    /// The pod is over: its status is completed.
    pub fn terminate(&self, pod: &Pod, now: SystemTime) {
        let (uid, mirror) = (pod_ref(pod).uid, self.mirror(pod));
        let set = self.store().terminate_pod(&uid, pod, mirror.as_deref(), now);
        self.tell(pod, set, false);
    }

    fn tell(&self, pod: &Pod, set: Result<bool, super::IllegalTransition>, stopped: bool) {
        let changed = set.unwrap_or_else(|error| {
            tracing::warn!(pod = %pod_ref(pod), %error, "status not taken over");
            false
        });
        if changed || stopped {
            self.compare(&pod_ref(pod).uid);
        }
    }

    /// Forgets every pod that is not in `known`.
    pub fn retain(&self, known: &HashSet<PodUid>) {
        self.store().retain(|uid| known.contains(uid));
    }

    /// UIDs of all pods something was said of, in no order.
    pub fn uids(&self) -> Vec<PodUid> {
        self.store().iter().map(|(uid, _)| uid.clone()).collect()
    }

    /// What was last said of a pod, with all that is known about it.
    pub fn stored(&self, uid: &PodUid) -> Option<Stored> {
        self.store().get(uid.as_str()).cloned()
    }

    /// What was last said of a pod.
    pub fn get(&self, uid: &PodUid) -> Option<PodStatus> {
        self.store().get(uid.as_str()).map(|stored| stored.status.clone())
    }

    /// The last status said that all containers are being restarted (KEP-5532).
    pub fn restarting_all(&self, uid: &PodUid) -> bool {
        self.store().get(uid.as_str()).is_some_and(|stored| {
            let mut all = stored.status.conditions.iter().flatten();
            all.any(|c| c.type_ == conditions::ALL_CONTAINERS_RESTARTING && c.status == "True")
        })
    }

    /// When `activeDeadlineSeconds` will have passed, if the pod has such a limit and has started.
    pub fn active_deadline(&self, pod: &Pod) -> Option<SystemTime> {
        let seconds = pod.spec.as_ref()?.active_deadline_seconds?;
        let started = self.get(&pod_ref(pod).uid)?.start_time?;
        let started = Duration::from_nanos(u64::try_from(started.0.as_nanosecond()).ok()?);
        SystemTime::UNIX_EPOCH.checked_add(started + Duration::from_secs(u64::try_from(seconds).ok()?))
    }
}
