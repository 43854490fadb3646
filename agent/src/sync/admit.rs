//! Admission in the sync loop: decides once per pod UID, stores the decision, and publishes the status of rejected pods.
//!
//! Checks are decided at once, and a pod that does not pass waits only if that may be wrong: until the runtime has reported
//! whether it runs already, until the Node was read once more, or until other pods were evicted for it. After an agent start
//! new pods of the API server also wait for the static pods, which hold their resources already. What an admitted pod holds
//! counts until its containers have ended, what a rejected one asked for never does.
//!
//! A pod can be rejected although its containers run, where this agent replaced another kubelet. Such a pod is not
//! killed: it runs on unmanaged until it is deleted or removed, and then terminates with its own grace period. An event says
//! why, and its status stays as it is, so that it is not wrong once the pod is managed again. When no container of it
//! runs any more it fails like any rejected pod, unless all of them have succeeded.

mod waits;

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::waits::Awaited;
use self::waits::StaticPods;
use self::waits::Wait;
use self::waits::runs;
use super::EvictionSender;
use super::housekeeping::is_empty;
use super::preemption;
use super::preemption::RecordPreemption;
use super::task::SyncLoop;
use crate::admission;
use crate::admission::AdmissionResult;
use crate::admission::Candidate;
use crate::admission::Candidates;
use crate::admission::Decision;
use crate::admission::Decisions;
use crate::admission::Input;
use crate::admission::Insufficient;
use crate::admission::NODE_AFFINITY;
use crate::admission::Needs;
use crate::admission::NodeOffer;
use crate::admission::Rejection;
use crate::model::ContainerState;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::QosClass;
use crate::model::pod_ref;
use crate::model::qos;
use crate::model::qos::ResourceKind;
use crate::model::qos::qos_class;
use crate::model::spec;
use crate::recorder::EventType;
use crate::workers::state::KillOptions;
use crate::workers::state::is_terminal;

/// Reads the Node from the API server; `None` if that fails.
pub type ReadNode = Arc<dyn Fn() -> BoxFuture<'static, Option<Arc<Node>>> + Send + Sync>;

/// What the runtime has of a rejected pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remains {
    /// A container that runs, as far as known.
    Running,
    /// Containers that have ended, or sandboxes.
    Ended,
    /// Nothing.
    Nothing,
}

/// The decisions of the sync loop, and what they are based on.
pub struct PodAdmission {
    offer: watch::Receiver<NodeOffer>,
    evictions: EvictionSender,
    /// `None` without an API server.
    read_node: Option<ReadNode>,
    record: RecordPreemption,
    decisions: Decisions,
    /// Pods that are admitted, or run although they are rejected, with what they hold since then.
    holding: HashMap<PodUid, Candidate>,
    /// Pods that are being preempted: what they hold belongs to critical pods.
    preempted: HashSet<PodUid>,
    /// Pods that are not decided on, or not started, for now.
    waiting: HashMap<PodUid, Wait>,
    /// Number of the wait that began last.
    last_wait: u64,
    /// Nodes that were read for pods; `None` if that failed.
    fresh_nodes: HashMap<PodUid, Option<Arc<Node>>>,
    /// Rejected pods whose event is recorded.
    announced: HashSet<PodUid>,
    /// Pods that the PLEG was asked for, with whether they run.
    viewed: HashMap<PodUid, bool>,
    /// Whether new pods of the API server may have to wait for static pods.
    static_pods: StaticPods,
    tasks: JoinSet<Awaited>,
}

impl PodAdmission {
    /// No decisions yet. Each is based on what `offer` holds at that time. Pods are given to `record` before they are preempted.
    pub fn new(
        offer: watch::Receiver<NodeOffer>,
        evictions: EvictionSender,
        read_node: Option<ReadNode>,
        record: RecordPreemption,
    ) -> Self {
        Self {
            offer,
            evictions,
            read_node,
            record,
            decisions: Decisions::default(),
            holding: HashMap::new(),
            preempted: HashSet::new(),
            waiting: HashMap::new(),
            last_wait: 0,
            fresh_nodes: HashMap::new(),
            announced: HashSet::new(),
            viewed: HashMap::new(),
            static_pods: StaticPods::NotAwaited,
            tasks: JoinSet::new(),
        }
    }

    /// The pod was rejected.
    pub(super) fn is_rejected(&self, uid: &PodUid) -> bool {
        self.decisions.rejection(uid).is_some()
    }

    /// The source removed the pod: its UID is decided on again if it comes back.
    pub(super) fn remove(&mut self, uid: &PodUid) {
        self.decisions.remove(uid);
        self.holding.remove(uid);
        self.waiting.remove(uid);
        self.fresh_nodes.remove(uid);
        self.viewed.remove(uid);
        self.announced.remove(uid);
    }

    /// The pod has to wait for something.
    pub(super) fn is_waiting(&self, uid: &PodUid) -> bool {
        self.waiting.contains_key(uid)
    }

    /// The pod holds this from now on, if it holds something, and no less than before: what it is to give up is freed when
    /// that is applied.
    pub(super) fn hold_more(&mut self, uid: &PodUid, pod: &Pod, mut needs: Needs) {
        if let Some(held) = self.holding.get_mut(uid) {
            needs.raise(&held.needs);
            *held = Candidate { pod: pod.clone(), needs };
        }
    }

    /// The pod holds this from now on, if it holds something. True if that is less CPU or memory than before.
    pub(super) fn hold_again(&mut self, uid: &PodUid, pod: &Pod, needs: Needs) -> bool {
        let Some(held) = self.holding.get_mut(uid) else { return false };
        let is_less = needs.is_below(&held.needs);
        *held = Candidate { pod: pod.clone(), needs };
        is_less
    }
}

/// A pod whose quantities cannot be read is rejected when it is started.
pub(super) fn needs(pod: &Pod) -> Needs {
    Needs::new(pod, &qos::pod_total(pod, ResourceKind::Requests, true).unwrap_or_default())
}

impl SyncLoop {
    /// Whether the pod may have a worker. A pod that is to be deleted, or had ended before the agent knew it, needs one in
    /// any case: admission does not concern its end.
    pub(super) fn admit(&mut self, desired: &Pod) -> bool {
        let uid = pod_ref(desired).uid;
        let pod = &self.allocations.allocated_form(desired.clone());
        if spec::deletion_requested(pod) || self.workers.contains(&uid) {
            self.hold(&uid, pod);
            return true;
        }
        if self.admission.waiting.contains_key(&uid) {
            return false;
        }
        if !self.admission.decisions.contains(&uid) {
            if is_terminal(pod) {
                return true;
            }
            if self.has_to_await_static_pods(&uid, pod) {
                self.admission.await_static_pods(&uid);
                return false;
            }
            let Some(decision) = self.decide(&uid, pod) else { return false };
            self.admission.decisions.store(uid.clone(), decision);
            match self.admission.decisions.rejection(&uid) {
                None => {
                    if !self.allocations.is_allocated(&uid) {
                        self.allocations.allocate(pod);
                    }
                    self.hold(&uid, pod);
                }
                Some(Rejection { reason, .. }) => {
                    self.workers.rejected(reason);
                    self.settle_rejected(&uid);
                }
            }
        }
        !self.admission.is_rejected(&uid) && !self.admission.waiting.contains_key(&uid)
    }

    /// The pod holds what is allocated to it from now on. Later changes of its spec do not count.
    fn hold(&mut self, uid: &PodUid, pod: &Pod) {
        if !self.admission.holding.contains_key(uid) {
            let needs = self.held_needs(pod);
            self.admission.holding.insert(uid.clone(), Candidate { pod: pod.clone(), needs });
        }
    }

    /// What the node offers to pods now.
    pub(super) fn node_offer(&self) -> NodeOffer {
        let (shutting_down, pressures) = (*self.requests.closed.borrow(), *self.requests.pressures.borrow());
        NodeOffer { shutting_down, pressures, ..self.admission.offer.borrow().clone() }
    }

    /// What the checks yield for a pod beside all others.
    pub(super) fn decide_on(&self, uid: &PodUid, pod: &Pod, is_resumed: bool, node: NodeOffer) -> AdmissionResult {
        let held = self.holding_besides(uid).map(|(_, other)| &other.needs).collect();
        admission::decide(Input {
            pod,
            // A pod whose class cannot be computed is rejected when it is started.
            best_effort: qos_class(pod).is_ok_and(|class| class == QosClass::BestEffort),
            is_resumed,
            needs: &needs(pod),
            held: &held,
            node: &node,
        })
    }

    /// The decision on a pod; `None` if it has to wait for one.
    fn decide(&mut self, uid: &PodUid, pod: &Pod) -> Option<Decision> {
        let resumed = self.is_resumed(uid, pod);
        let fresh_node = self.admission.fresh_nodes.remove(uid);
        let mut node = self.node_offer();
        if let Some(Some(object)) = &fresh_node {
            node.node = node.node.map(|info| Arc::new(info.with_object(object)));
        }
        match self.decide_on(uid, pod, resumed == Some(true), node) {
            AdmissionResult::Admit => Some(Decision::Admit),
            _ if self.pleg.cached(uid).is_none() && !self.admission.viewed.contains_key(uid) => {
                self.admission.await_view(uid, &self.pleg);
                None
            }
            AdmissionResult::Preempt(missing) => Some(self.preempt(uid, pod, &missing)),
            AdmissionResult::Reject(rejection) => match self.admission.read_node.clone() {
                // The pod may have been bound to labels that are newer than the known ones.
                Some(read) if rejection.reason == NODE_AFFINITY && fresh_node.is_none() => {
                    self.admission.await_node(uid, &read);
                    None
                }
                _ => Some(Decision::Reject(rejection)),
            },
        }
    }

    /// An earlier agent has admitted the pod: its status has a start time, or the runtime runs it. `None` before the runtime
    /// has reported.
    pub(super) fn is_resumed(&self, uid: &PodUid, pod: &Pod) -> Option<bool> {
        // The status of a static pod is that of its mirror pod, which may be one of an earlier manifest.
        let has_started = pod.status.as_ref().is_some_and(|status| status.start_time.is_some());
        if has_started && !spec::is_static(pod) {
            return Some(true);
        }
        self.pleg.cached(uid).map(|snapshot| runs(&snapshot)).or_else(|| self.admission.viewed.get(uid).copied())
    }

    /// Other pods that hold something of the node: those that are admitted and may still run.
    fn holding_besides(&self, uid: &PodUid) -> impl Iterator<Item = (&PodUid, &Candidate)> {
        let PodAdmission { holding, preempted, .. } = &self.admission;
        let holds = move |other: &PodUid| other != uid && !preempted.contains(other) && !self.workers.has_ended(other);
        holding.iter().filter(move |(other, _)| holds(other))
    }

    /// Evicts other pods for a critical one that lacks resources. It is admitted at once and started when they have ended.
    fn preempt(&mut self, uid: &PodUid, pod: &Pod, missing: &[Insufficient]) -> Decision {
        let mut candidates = Candidates::default();
        let mut others: Vec<_> = self.holding_besides(uid).collect();
        // The choice between equal pods does not depend on the map's order.
        others.sort_by_key(|(uid, _)| *uid);
        // A pod that has not been started cannot be ended either, and an unmanaged one is not.
        others.retain(|(uid, other)| {
            let is_managed = !self.admission.waiting.contains_key(*uid) && !self.admission.is_rejected(uid);
            is_managed && admission::is_preemptable(pod, &other.pod)
        });
        for (_, other) in others {
            let class = match qos_class(&other.pod) {
                Ok(QosClass::Guaranteed) => &mut candidates.guaranteed,
                Ok(QosClass::Burstable) => &mut candidates.burstable,
                Ok(QosClass::BestEffort) | Err(_) => &mut candidates.best_effort,
            };
            class.push(other.clone());
        }
        let victims = match admission::victims(missing, candidates) {
            Ok(victims) => victims,
            Err(rejection) => return Decision::Reject(rejection),
        };
        let uids: Vec<PodUid> = victims.iter().map(|victim| pod_ref(&victim.pod).uid).collect();
        self.admission.preempted.extend(uids.iter().cloned());
        let wait = self.admission.begin_wait(uid, Wait::Victims);
        let (uid, evictions, recorder) = (uid.clone(), self.admission.evictions.clone(), self.recorder.clone());
        let resource = missing.first().map(|missing| missing.resource.clone()).unwrap_or_default();
        let record = self.admission.record.clone();
        self.admission.tasks.spawn(async move {
            let ended = preemption::evict(victims, evictions, recorder, record).await;
            Awaited::Preempted { uid, wait, victims: uids, resource, ended }
        });
        Decision::Admit
    }

    /// The order in which pods are decided on: those that run already, then the oldest.
    pub(super) fn sort_for_admission(&self, pods: &mut [Pod]) {
        sort(pods, |pod| self.is_resumed(&pod_ref(pod).uid, pod) == Some(true));
    }

    /// Publishes the status of a rejected pod without worker. While a container of it runs the status stays as it is. When
    /// none does the pod has failed, and a worker releases what the runtime still has of it.
    pub(super) fn settle_rejected(&mut self, uid: &PodUid) {
        let Some(Rejection { reason, message }) = self.admission.decisions.rejection(uid).cloned() else { return };
        let Some(pod) = self.pods.by_uid(uid).filter(|_| !self.workers.contains(uid)) else { return };
        let (remains, now) = (self.remains(uid), self.clock.wall());
        if self.admission.announced.insert(uid.clone()) {
            let text = match remains {
                Remains::Running => format!("{message}; its containers run on unmanaged until the pod is deleted"),
                Remains::Ended | Remains::Nothing => message.clone(),
            };
            self.recorder.pod_event(&pod, "", EventType::Warning, &reason, &text);
        }
        if remains == Remains::Running {
            self.hold(uid, &pod);
            return self.statuses.keep(&pod, now);
        }
        self.admission.viewed.insert(uid.clone(), false);
        if remains == Remains::Ended {
            self.statuses.reject_ended(&pod, &reason, &message, now);
            // It holds what it has until the worker has released it.
            self.workers.terminate_unmanaged(pod, KillOptions::default());
        } else {
            self.admission.holding.remove(uid);
            self.statuses.reject(&pod, &reason, &message, now);
        }
    }

    /// What the runtime has of a pod. A container whose state the runtime does not know may run, and so may those of a pod
    /// that the runtime has listed, or may have, and that it did not describe in time.
    fn remains(&self, uid: &PodUid) -> Remains {
        // Read before the cache, so that a pod that is inspected meanwhile is in one of them.
        let uninspected = self.pleg.uninspected();
        let may_run = |state| matches!(state, ContainerState::Running | ContainerState::Unknown);
        match self.pleg.cached(uid) {
            Some(snapshot) if snapshot.containers.iter().any(|container| may_run(container.state)) => Remains::Running,
            Some(snapshot) if !is_empty(&snapshot) => Remains::Ended,
            Some(_) => Remains::Nothing,
            None => {
                let counts_as_running = self.admission.viewed.get(uid) == Some(&true);
                let may_exist = uninspected.is_none_or(|pods| pods.contains(uid));
                if counts_as_running && may_exist { Remains::Running } else { Remains::Nothing }
            }
        }
    }

    /// The same for all rejected pods.
    pub(super) fn settle_all_rejected(&mut self) {
        let rejected: Vec<PodUid> = self.admission.decisions.rejected().cloned().collect();
        rejected.iter().for_each(|uid| self.settle_rejected(uid));
    }
}

fn sort(pods: &mut [Pod], runs: impl Fn(&Pod) -> bool) {
    pods.sort_by_cached_key(|pod| (!runs(pod), pod.metadata.creation_timestamp.clone()));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::testing;

    #[test]
    fn running_pods_are_decided_on_first_and_then_the_oldest() {
        let pod = |name: &str, created: Option<u64>| {
            let mut pod = testing::pod("Always", &[], &["main"]);
            pod.metadata.name = Some(name.to_owned());
            pod.metadata.creation_timestamp = created.map(|seconds| testing::time(Duration::from_secs(seconds)));
            Arc::new(pod)
        };
        let mut pods = [
            pod("third", Some(3)),
            pod("running, second", Some(9)),
            pod("second, listed later", Some(2)),
            pod("first", Some(1)),
            pod("second, listed last", Some(2)),
            pod("running, first", Some(8)),
            pod("without a time", None),
        ];
        sort(&mut pods, |pod| pod.metadata.name.as_deref().is_some_and(|name| name.starts_with("running")));
        let names: Vec<&str> = pods.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect();
        let [of_running, others] = [&names[..2], &names[2..]];
        assert_eq!(of_running, ["running, first", "running, second"]);
        assert_eq!(others, ["without a time", "first", "second, listed later", "second, listed last", "third"]);
    }
}
