//! The status store as workers and servers share it: one lock, short calls.

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

use super::NodeAddresses;
use super::StatusInput;
use super::StatusStore;
use super::conditions;
use super::generate;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::StartFailure;
use crate::model::pod_ref;
use crate::model::restart::RestartGates;

/// Published statuses. Cheap to clone; no call blocks for longer than it takes to generate one status.
#[derive(Clone)]
pub struct Statuses {
    store: Arc<Mutex<StatusStore>>,
    about: Arc<About>,
}

struct About {
    runtime_type: String,
    node: Option<NodeAddresses>,
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
    /// An empty board. `runtime_type` is the part of container ids before `://`.
    pub fn new(runtime_type: String, node: Option<NodeAddresses>, gates: RestartGates) -> Self {
        let about = About { runtime_type, node, gates };
        Self { store: Arc::new(Mutex::new(StatusStore::new(gates))), about: Arc::new(about) }
    }

    fn store(&self) -> MutexGuard<'_, StatusStore> {
        // The store replaces entries whole: a panic elsewhere cannot leave one half-written.
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes what `view` says of the pod. Returns true if the phase is now Failed or Succeeded.
    pub fn publish(&self, pod: &Pod, view: &PodSnapshot, knowledge: Knowledge<'_>, now: SystemTime) -> bool {
        let uid = pod_ref(pod).uid;
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
            node: self.about.node.as_ref(),
            gates: self.about.gates,
            now,
        });
        let terminal = is_terminal(&status);
        if let Err(error) = store.set(&uid, pod, None, status, now) {
            tracing::warn!(pod = %pod_ref(pod), %error, "status not taken over");
        }
        terminal
    }

    /// The pod is refused or rejected before anything of it ran.
    pub fn reject(&self, pod: &Pod, reason: &str, message: &str, now: SystemTime) {
        let status = PodStatus {
            phase: Some("Failed".to_owned()),
            reason: Some(reason.to_owned()),
            message: Some(format!("Pod was rejected: {message}")),
            ..PodStatus::default()
        };
        if let Err(error) = self.store().set(&pod_ref(pod).uid, pod, None, status, now) {
            tracing::warn!(pod = %pod_ref(pod), %error, "status not taken over");
        }
    }

    /// The pod is over: its status is completed.
    pub fn terminate(&self, pod: &Pod, now: SystemTime) {
        if let Err(error) = self.store().terminate_pod(&pod_ref(pod).uid, pod, None, now) {
            tracing::warn!(pod = %pod_ref(pod), %error, "status not taken over");
        }
    }

    /// Forgets every pod that is not in `known`.
    pub fn retain(&self, known: &HashSet<PodUid>) {
        self.store().retain(|uid| known.contains(uid));
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

fn is_terminal(status: &PodStatus) -> bool {
    matches!(status.phase.as_deref(), Some("Failed" | "Succeeded"))
}
