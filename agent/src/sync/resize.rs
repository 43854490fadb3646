//! In-place resizes in the sync loop (KEP-1287): which desired resources are allocated to pods, in which order, and when
//! those that have to wait are tried again.
//!
//! The loop alone allocates; it never waits. What a pod holds of the node is the larger of what is allocated to it and what
//! is in force in its running containers, so that a shrinking pod frees its room when its worker has applied that, or has
//! found that there is nothing to apply it to.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::task::SyncLoop;
use crate::admission::AdmissionResult;
use crate::admission::Needs;
use crate::admission::Rejection;
use crate::allocation;
use crate::allocation::Class;
use crate::allocation::Pending;
use crate::allocation::Queue;
use crate::allocation::Rank;
use crate::allocation::ResizePolicy;
use crate::allocation::Waits;
use crate::allocation::report;
use crate::model::Amount;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::QosClass;
use crate::model::pod_ref;
use crate::model::qos::qos_class;
use crate::model::resources;
use crate::model::resources::Quantities;
use crate::model::sleep_until;
use crate::model::spec;
use crate::recorder::EventType;
use crate::workers::generate::resources as pod_resources;
use crate::workers::state::Request;

/// The first periodic retry, and those while not all sources have been read.
const FIRST_RETRY: Duration = Duration::from_secs(30);
/// Further periodic retries.
const RETRY: Duration = Duration::from_secs(180);

/// Resizes that wait.
pub struct PendingResizes {
    queue: Queue,
    policy: ResizePolicy,
    retry_at: Instant,
}

impl PendingResizes {
    /// No resizes, on a node with these settings.
    pub fn new(policy: ResizePolicy) -> Self {
        Self { queue: Queue::default(), policy, retry_at: Instant::now() + FIRST_RETRY }
    }

    /// Waits until those that wait are to be tried again; never returns without any. Cancel-safe.
    pub(super) fn due(&self) -> impl Future<Output = ()> + use<> {
        sleep_until((!self.queue.is_empty()).then_some(self.retry_at))
    }
}

/// Why resizes are tried again.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trigger {
    PodsAdded,
    PodUpdated,
    PodsRemoved,
    PodTerminated,
    PodResized,
    Periodic,
}

impl Trigger {
    /// Label `retry_trigger`.
    fn label(self) -> &'static str {
        match self {
            Self::PodsAdded => "pods_added",
            Self::PodUpdated => "pod_updated",
            Self::PodsRemoved => "pods_removed",
            Self::PodTerminated => "pod_terminated",
            Self::PodResized => "pod_resized",
            Self::Periodic => "periodic_retry",
        }
    }
}

/// What becomes of a resize that was tried.
enum Tried {
    /// It waits on.
    Waits,
    /// It is allocated, infeasible, or there is none.
    Done,
}

impl SyncLoop {
    /// Pods were added, of which an earlier agent may have left resizes, or started after a wait in which their specs may have
    /// changed.
    pub(super) fn find_resizes(&mut self, pods: &[Pod]) {
        let mut found = false;
        for pod in pods {
            let uid = pod_ref(pod).uid;
            if self.pods.by_uid(&uid).is_none() {
                // A mirror pod.
                continue;
            }
            if !self.is_as_allocated(pod) {
                self.push_resize(uid);
                found = true;
            }
        }
        if found {
            self.retry_resizes(Trigger::PodsAdded);
        }
    }

    /// The pod's spec is another one: allocates its resources, if those have changed and there is room.
    pub(super) fn on_spec(&mut self, before: Option<&Pod>, pod: &Pod) {
        if !before.is_some_and(|before| self.count_changes(before, pod)) {
            return;
        }
        let uid = pod_ref(pod).uid;
        if !self.is_as_allocated(pod) {
            self.push_resize(uid);
            self.retry_resizes(Trigger::PodUpdated);
        } else {
            self.resizes.queue.remove(&uid);
            self.allocations.clear_pending(&uid);
            self.count_resizes();
        }
    }

    /// Counts the changes of cpu and memory. True if there are any.
    fn count_changes(&self, before: &Pod, pod: &Pod) -> bool {
        let of_pod = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.resources.clone());
        let mut changed = !resources::is_same_pod_level(of_pod(before).as_ref(), of_pod(pod).as_ref());
        let before = spec::lasting_by_name(before);
        for container in spec::lasting_containers(pod).filter(|container| self.allocations.resizes(container.class)) {
            let Some(&old) = before.get(container.name()) else { continue };
            let (old, new) = [old, container].map(|c| c.spec.resources.clone().unwrap_or_default()).into();
            for (requirement, old, new) in
                [("requests", &old.requests, &new.requests), ("limits", &old.limits, &new.limits)]
            {
                for resource in ["cpu", "memory"] {
                    if let Some(operation) = operation(old.as_ref(), new.as_ref(), resource) {
                        self.metrics.resizes.requested(operation, requirement, resource);
                        changed = true;
                    }
                }
            }
        }
        changed
    }

    fn is_as_allocated(&self, pod: &Pod) -> bool {
        Arc::ptr_eq(&self.allocations.allocated_form(pod.clone()), pod)
    }

    fn push_resize(&mut self, uid: PodUid) {
        let (pods, allocations) = (&self.pods, &self.allocations);
        let rank = |uid: &PodUid| {
            let desired = pods.by_uid(uid)?;
            let allocated = allocations.allocated_form(desired.clone());
            let request = |pod: &Pod| pod_resources::requested(pod).unwrap_or_default();
            let (has, wants) = (request(&allocated), request(&desired));
            Some(Rank {
                grows: wants.milli_cpu > has.milli_cpu || wants.memory > has.memory,
                priority: Reverse(desired.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0)),
                is_not_guaranteed: class_of(&desired) != Class::Guaranteed,
                waits: allocations.pending_since(uid).map_or(Waits::New, Waits::Since),
            })
        };
        self.resizes.queue.push(uid, rank);
    }

    /// Tries all resizes that wait, in order; later ones see what is allocated to earlier ones.
    pub(super) fn retry_resizes(&mut self, trigger: Trigger) {
        let is_ready = self.sources.all_ready();
        self.resizes.retry_at = Instant::now() + if is_ready { RETRY } else { FIRST_RETRY };
        if !is_ready {
            return;
        }
        let mut waiting = Vec::new();
        for uid in self.resizes.queue.take() {
            if matches!(self.try_resize(&uid, trigger), Tried::Waits) {
                waiting.push(uid);
            }
        }
        self.resizes.queue.restore(waiting);
        self.count_resizes();
    }

    fn try_resize(&mut self, uid: &PodUid, trigger: Trigger) -> Tried {
        if self.admission.is_waiting(uid) {
            return Tried::Waits;
        }
        let Some(pod) = self.pods.by_uid(uid) else { return Tried::Done };
        let ends = spec::deletion_requested(&pod) || self.workers.termination_requested(uid);
        if ends || self.admission.is_rejected(uid) {
            self.allocations.clear_pending(uid);
            return Tried::Done;
        }
        let allocated = self.allocations.allocated_form(pod.clone());
        if Arc::ptr_eq(&allocated, &pod) {
            self.allocations.clear_pending(uid);
            self.workers.request_sync(uid);
            return Tried::Done;
        }
        if let Some(never) = allocation::infeasible(&pod, &allocated, class_of(&pod), self.resizes.policy) {
            self.metrics.resizes.infeasible(never.detail);
            self.refuse_resize(&pod, Pending::Infeasible, "Infeasible", never.message);
            return Tried::Done;
        }
        if let Some(Rejection { reason, message }) = self.judge_resize(uid, &pod) {
            self.refuse_resize(&pod, Pending::Deferred, &reason, &message);
            return Tried::Waits;
        }
        self.accept_resize(uid, pod, trigger);
        Tried::Done
    }

    /// Why the pod as it desires to be cannot be admitted now; `None` if it can. No other pod is preempted for it.
    fn judge_resize(&self, uid: &PodUid, pod: &Pod) -> Option<Rejection> {
        match self.decide_on(uid, pod, false, self.node_offer()) {
            AdmissionResult::Admit => None,
            AdmissionResult::Reject(rejection) => Some(rejection),
            AdmissionResult::Preempt(missing) => missing.first().map(crate::admission::Insufficient::rejection),
        }
    }

    fn refuse_resize(&mut self, pod: &Pod, pending: Pending, reason: &str, message: &str) {
        let uid = pod_ref(pod).uid;
        let before = self.allocations.conditions(&uid);
        if self.allocations.set_pending(pod, pending, message, self.clock.wall()) {
            let text = report(pod, pod.metadata.generation, message);
            let event = format!("Resize{}", pending.reason());
            self.recorder.pod_event(pod, "", EventType::Warning, &event, &format!("Pod resize {reason}: {text}"));
        }
        // Each pod that ends is a reason to try all that wait again.
        if self.allocations.conditions(&uid) != before {
            self.workers.request_sync(&uid);
        }
    }

    fn accept_resize(&mut self, uid: &PodUid, pod: Pod, trigger: Trigger) {
        if self.allocations.pending(uid) == Some(Pending::Deferred) {
            self.metrics.resizes.deferred_accepted(trigger.label());
        }
        self.allocations.accept(&pod, self.clock.wall());
        self.admission.hold_more(uid, &pod, self.held_needs(&pod));
        let text = report(&pod, pod.metadata.generation, "");
        let message = format!("Pod resize started: {text}");
        self.recorder.pod_event(&pod, "", EventType::Normal, "ResizeStarted", &message);
        if self.workers.contains(uid) {
            self.workers.request(&pod_ref(&pod), Request::Update(pod));
        }
    }

    /// What a pod holds: the larger of what is allocated to it and what is in force. Before the runtime has reported which
    /// of its containers run it is in force in all of them, and counted again later.
    pub(super) fn held_needs(&self, pod: &Pod) -> Needs {
        let uid = pod_ref(pod).uid;
        let allocated = self.allocations.allocated_form(pod.clone());
        let mut needs = super::admit::needs(&allocated);
        let Some(mut actuated) = self.allocations.actuated(&uid) else { return needs };
        match self.pleg.cached(&uid) {
            Some(snapshot) => actuated.retain_running(&allocated, &snapshot),
            None => self.allocations.count_again(&uid),
        }
        if let Some(in_force) = actuated.put_into(&allocated, true) {
            needs.raise(&super::admit::needs(&Arc::new(in_force)));
        }
        needs
    }

    /// Workers have applied what was allocated, or have found it applied: pods that got less have freed room.
    pub(super) fn on_applied(&mut self, uids: &[PodUid]) {
        let mut has_shrunk = false;
        for uid in uids {
            let Some(pod) = self.pods.by_uid(uid) else { continue };
            let needs = self.held_needs(&pod);
            has_shrunk |= self.admission.hold_again(uid, &pod, needs);
        }
        match has_shrunk {
            true => self.retry_resizes(Trigger::PodResized),
            false => self.count_resizes(),
        }
    }

    fn count_resizes(&self) {
        let (pending, in_progress) = self.allocations.counts();
        for (reason, count) in pending {
            self.metrics.resizes.set_pending(&reason.to_lowercase(), count);
        }
        self.metrics.resizes.set_in_progress(in_progress);
    }
}

fn class_of(pod: &Pod) -> Class {
    match qos_class(pod) {
        Ok(QosClass::Guaranteed) => Class::Guaranteed,
        Ok(QosClass::Burstable) => Class::Burstable,
        // A pod whose class cannot be computed never runs.
        Ok(QosClass::BestEffort) | Err(_) => Class::BestEffort,
    }
}

/// The change of one quantity, as the metric names it; `None` if it is equal.
fn operation(old: Option<&Quantities>, new: Option<&Quantities>, resource: &str) -> Option<&'static str> {
    let stated = |list: Option<&Quantities>| list?.get(resource).and_then(|quantity| Amount::try_from(quantity).ok());
    // As upstream: an amount of zero is none.
    let amount = |list| stated(list).unwrap_or_default();
    match (amount(old), amount(new)) {
        (old, new) if old == new => None,
        (old, _) if old.is_zero() => Some("add"),
        (_, new) if new.is_zero() => Some("remove"),
        (old, new) if new > old => Some("increase"),
        _ => Some("decrease"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn operations() {
        let list = |value: serde_json::Value| -> Quantities { serde_json::from_value(value).expect("quantities") };
        let of = |old, new| operation(Some(&list(old)), Some(&list(new)), "cpu");
        assert_eq!(of(json!({}), json!({ "cpu": "1" })), Some("add"));
        assert_eq!(of(json!({ "cpu": "1" }), json!({})), Some("remove"));
        assert_eq!(of(json!({ "cpu": "1" }), json!({ "cpu": "1001m" })), Some("increase"));
        assert_eq!(of(json!({ "cpu": "1" }), json!({ "cpu": "999m" })), Some("decrease"));
        assert_eq!(of(json!({ "cpu": "1" }), json!({ "cpu": "1000m", "memory": "1" })), None);
        assert_eq!(of(json!({ "cpu": "0" }), json!({ "cpu": "1" })), Some("add"));
        assert_eq!(of(json!({ "cpu": "1" }), json!({ "cpu": "0" })), Some("remove"));
        assert_eq!(of(json!({}), json!({ "cpu": "0" })), None);
    }
}
