//! What the sync loop does with each kind of update of a desired pod, and with requests to terminate one.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod as ApiPod;

use super::kill_requests::KillRequest;
use super::kill_requests::bound_grace_period;
use super::pods::is_mirror;
use super::resize::Trigger;
use super::task::SyncLoop;
use crate::admission;
use crate::admission::path_safety;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::recorder::EventType;
use crate::workers::state::KillOptions;
use crate::workers::state::PodState;
use crate::workers::state::Request;
use crate::workers::state::is_terminal;

impl SyncLoop {
    pub(super) fn add(&mut self, pod: Pod) {
        self.pods.set(pod.clone());
        if is_mirror(&pod) {
            return self.on_mirror(&pod);
        }
        let id = pod_ref(&pod);
        // Before there is a worker, which completes what an earlier agent has begun.
        self.allocations.read_back(&pod, self.clock.wall());
        if is_terminal(&pod) && !self.workers.contains(&id.uid) && !self.may_run(&id.uid) {
            self.workers.start(PodState::already_terminated(id, pod.clone()));
        } else if self.admit(&pod) {
            self.workers.request(&id, Request::Create(pod.clone()));
        }
        self.reconcile_mirror_of(&pod);
    }

    pub(super) fn update(&mut self, pod: Pod) {
        let (pod, problem) = self.with_safe_spec(pod);
        if let Some(problem) = problem {
            let message = format!("Pod is invalid: {problem}; it keeps its previous spec");
            self.recorder.pod_event(&pod, "", EventType::Warning, path_safety::REASON, &message);
        }
        let before = self.pods.by_uid(&pod_ref(&pod).uid);
        self.pods.set(pod.clone());
        if is_mirror(&pod) {
            return self.on_mirror(&pod);
        }
        let id = pod_ref(&pod);
        if self.admit(&pod) {
            self.on_spec(before.as_ref(), &pod);
            self.workers.request(&id, Request::Update(pod.clone()));
        }
        self.report_missing_features(before.as_ref(), &pod);
        // The deletion may be all that the last API call about this pod waited for.
        self.statuses.request_sync(&id.uid);
        self.reconcile_mirror_of(&pod);
    }

    /// The update requires what the node does not declare (KEP-5328). As upstream it goes on: an API server with the feature
    /// refuses such updates.
    fn report_missing_features(&self, before: Option<&Pod>, pod: &Pod) {
        let declared = self.node_offer().declared_features;
        let missing = before.and_then(|before| admission::missing_for_update(declared.as_deref(), before, pod));
        if let Some(message) = missing {
            self.recorder.pod_event(pod, "", EventType::Warning, "FailedNodeDeclaredFeaturesCheck", &message);
        }
    }

    /// The updated pod, with the known spec if the new one is unsafe, and what is wrong with it. An admitted pod is not
    /// terminated for a later change of its object; deletion, labels and status of the change count.
    fn with_safe_spec(&self, pod: Pod) -> (Pod, Option<String>) {
        let Some(problem) = path_safety::content(&pod) else { return (pod, None) };
        match self.pods.by_uid(&pod_ref(&pod).uid).filter(|known| path_safety::content(known).is_none()) {
            Some(known) => (Arc::new(ApiPod { spec: known.spec.clone(), ..ApiPod::clone(&pod) }), Some(problem)),
            // It was rejected when it was added.
            None => (pod, None),
        }
    }

    /// Only the API status differs: an input of the next decision, and of the pod's readiness gates. A terminal phase of a
    /// pod whose worker does not end it was set by another client: the worker does so now.
    pub(super) fn reconcile(&mut self, pod: Pod) {
        let (pod, _) = self.with_safe_spec(pod);
        self.pods.set(pod.clone());
        if is_mirror(&pod) {
            return;
        }
        let uid = pod_ref(&pod).uid;
        let has_ended = is_terminal(&pod);
        let gated = pod.spec.as_ref().is_some_and(|spec| spec.readiness_gates.iter().flatten().next().is_some());
        let ends = has_ended && !self.workers.termination_requested(&uid);
        self.workers.refresh(pod);
        if gated || ends {
            self.workers.request_sync(&uid);
        }
        if has_ended {
            self.retry_resizes(Trigger::PodTerminated);
        }
    }

    pub(super) fn remove(&mut self, pod: &Pod) {
        let id = pod_ref(pod);
        self.pods.remove(pod);
        if is_mirror(pod) {
            self.mirrors.removed(pod);
            return self.on_mirror(pod);
        }
        if self.admission.is_rejected(&id.uid) && !self.workers.contains(&id.uid) {
            self.workers.terminate_unmanaged(pod.clone(), KillOptions::default());
        } else {
            self.workers.request(&id, Request::Kill(KillOptions::default()));
        }
        self.admission.remove(&id.uid);
        self.allocations.free(&id.uid);
        self.housekeep_soon();
        self.reconcile_mirror_of(pod);
    }

    /// Terminates a pod although its source desires it.
    pub(super) fn kill(&mut self, request: KillRequest) {
        let KillRequest { uid, mut options } = request;
        let Some(pod) = self.pods.by_uid(&uid) else { return options.ended() };
        if self.workers.contains(&uid) {
            bound_grace_period(&pod, &mut options, &self.recorder);
            self.workers.request(&pod_ref(&pod), Request::Kill(options));
        } else if self.admission.is_rejected(&uid) && self.may_run(&uid) {
            bound_grace_period(&pod, &mut options, &self.recorder);
            self.workers.terminate_unmanaged(pod, options);
        } else {
            options.ended();
        }
    }

    /// A container or sandbox of the pod may run. True for a pod that the PLEG has not seen.
    pub(super) fn may_run(&self, uid: &PodUid) -> bool {
        self.pleg.cached(uid).is_none_or(|s| s.running().next().is_some() || s.sandboxes.iter().any(|s| s.ready))
    }

    /// A mirror pod was added, updated or removed. It never concerns the containers of its static pod.
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
}
