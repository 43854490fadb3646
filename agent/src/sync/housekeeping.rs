//! Housekeeping of the sync loop: restarts and terminates what the event-driven path missed, and starts the removal of
//! leftovers. Runs when there is a reason, not periodically, and again for a removal that could not start yet. Reconciles
//! mirror pods by full name.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::mirrors::MirrorAction;
use super::task::SyncLoop;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::workers::state::Request;

/// Removes what pods that no source desires have left on the node (directories, cgroups, logs). Implemented by the
/// modules that made them; blocking calls belong into it, not into the loop.
pub trait Leftovers: Send + Sync + 'static {
    /// Starts removing the leftovers of every pod not in `keep`. Must not block. Returns when it is to be called again if it
    /// cannot start yet. When what it could not remove is due again is received by [`Housekeeping`].
    fn remove_leftovers(&self, keep: &HashSet<PodUid>) -> Option<Instant>;
}

/// When housekeeping is due, and what it spares beside desired pods.
pub struct Housekeeping {
    leftovers: Arc<dyn Leftovers>,
    /// When the next attempt to remove leftovers is due.
    pub(super) leftovers_due: mpsc::Receiver<Instant>,
    /// When the next pass is due.
    pub(super) due: Option<Instant>,
    /// Pods that a source has and that cannot be decoded.
    pub(super) undecodable: HashSet<PodUid>,
}

impl Housekeeping {
    /// Leftovers are removed by `leftovers`, from which `leftovers_due` receives when the next attempt is due. No pass is
    /// due yet.
    pub fn new(leftovers: Arc<dyn Leftovers>, leftovers_due: mpsc::Receiver<Instant>) -> Self {
        Self { leftovers, leftovers_due, due: None, undecodable: HashSet::new() }
    }
}

impl SyncLoop {
    /// Terminates pods that no source desires, starts desired ones without worker, sweeps leftovers. Before all sources are
    /// ready no pod is known to be undesired, and before they are complete no static pod, but for those that were replaced.
    /// Static pods do not wait for the API server, which may be one of them.
    pub(super) fn housekeeping_pass(&mut self) {
        self.housekeeping.due = None;
        let are_ready = self.sources.all_ready();
        let pods = self.pods.all();
        let mut desired: HashSet<PodUid> = pods.iter().map(|pod| pod_ref(pod).uid).collect();
        if !are_ready {
            desired.extend(self.workers.uids());
        }
        let known = self.workers.sync_known(&desired);
        for pod in pods {
            let id = pod_ref(&pod);
            let restart = known.restart.contains(&id.uid);
            if (restart || !self.workers.contains(&id.uid)) && self.admit(&pod) {
                self.workers.request(&id, Request::Create(pod));
            }
        }
        // They run on, and what they have is not left over.
        desired.extend(self.housekeeping.undecodable.iter().cloned());
        if !are_ready {
            self.terminate_replaced_static_pods(&desired);
            return self.reconcile_mirrors(None);
        }
        self.settle_all_rejected();
        self.allocations.retain_allocated(&desired);
        let are_complete = self.sources.all_complete();
        for snapshot in self.pleg.all().into_iter().filter(|snapshot| are_complete || !is_static(snapshot)) {
            self.terminate_undesired(&desired, &snapshot);
        }
        if !are_complete {
            self.terminate_replaced_static_pods(&desired);
        }
        self.reconcile_mirrors(None);
        self.remove_leftovers(desired);
    }

    /// Terminates static pods that have another UID by now: the manifest was changed while no agent ran. A pod of the API
    /// server may have the name of a static pod.
    fn terminate_replaced_static_pods(&mut self, desired: &HashSet<PodUid>) {
        for snapshot in self.pleg.all() {
            let (successor, _) = self.pods.named(&snapshot.pod.full_name());
            if is_static(&snapshot) && successor.is_some_and(|pod| spec::is_static(&pod)) {
                self.terminate_undesired(desired, &snapshot);
            }
        }
    }

    /// Removes what is left of pods that are gone. Not while it is unknown which pods the runtime has. It may have pods that
    /// are not inspected yet: they are spared, and there is another pass when they are.
    fn remove_leftovers(&mut self, desired: HashSet<PodUid>) {
        // Read before the cache, so that a pod that is inspected meanwhile is in one of them.
        let Some(uninspected) = self.pleg.uninspected() else { return };
        let mut keep = desired;
        keep.extend(uninspected);
        let snapshots = self.pleg.all();
        keep.extend(snapshots.iter().filter(|s| !is_empty(s)).map(|s| s.pod.uid.clone()));
        keep.extend(self.workers.uids());
        self.workers.release_names(&keep);
        self.statuses.retain(&keep);
        self.allocations.retain_actuated(&keep);
        if let Some(due) = self.housekeeping.leftovers.remove_leftovers(&keep) {
            self.housekeep_at(due);
        }
    }

    /// Terminates a pod of the runtime that no source desires and that has no worker, and removes its remains. A desired
    /// pod without worker was rejected: it runs on.
    fn terminate_undesired(&mut self, desired: &HashSet<PodUid>, snapshot: &PodSnapshot) {
        let uid = &snapshot.pod.uid;
        if is_empty(snapshot) || desired.contains(uid) || self.workers.contains(uid) {
            return;
        }
        // What could not be removed of a pod that does not run is retried with a growing pause.
        let running = snapshot.running().next().is_some();
        if let Some(due) = self.workers.removal_due(&snapshot.pod).filter(|_| !running) {
            return self.housekeep_at(due);
        }
        if running || snapshot.sandboxes.iter().any(|sandbox| sandbox.ready) {
            tracing::info!(pod = %snapshot.pod, "terminating a pod that no source desires");
            self.workers.orphaned();
        } else {
            tracing::debug!(pod = %snapshot.pod, "removing what is left of a pod");
        }
        self.workers.request(&snapshot.pod, Request::KillRuntimeOnly);
    }

    pub(super) fn reconcile_mirror(&mut self, full_name: &str) {
        self.reconcile_mirror_beside(full_name, &self.workers.terminating_names());
    }

    /// As [`Self::reconcile_mirror`], while pods of these full names are being stopped.
    fn reconcile_mirror_beside(&mut self, full_name: &str, terminating: &HashSet<String>) {
        if self.sources.waiting_for().contains(&ConfigSource::Api) {
            // The existing mirror pods are not known yet.
            return;
        }
        let (pod, mirror) = self.pods.named(full_name);
        let pod = pod.filter(|pod| spec::is_static(pod));
        // A rejected pod has a worker only for what was left of it.
        let requested = |pod: &Pod| {
            let uid = &pod_ref(pod).uid;
            self.workers.termination_requested(uid) && !self.admission.is_rejected(uid)
        };
        let action = match pod {
            // A changed static pod has another UID, and waits until the containers of the previous one have ended. Until
            // then the mirror pod represents those.
            _ if terminating.contains(full_name) => MirrorAction::Keep,
            Some(pod) if !requested(&pod) => MirrorAction::Ensure(pod),
            Some(_) => MirrorAction::Keep,
            None if !self.sources.all_complete() => MirrorAction::Keep,
            None => MirrorAction::Delete,
        };
        self.mirrors.reconcile(full_name, &action, mirror.as_ref());
    }

    /// Reconciles one mirror pod, or all of them and those of all static pods.
    pub(super) fn reconcile_mirrors(&mut self, full_name: Option<String>) {
        let names: HashSet<String> = match full_name {
            Some(name) => [name].into(),
            None => {
                let pods = self.pods.all().into_iter().filter(|pod| spec::is_static(pod));
                pods.chain(self.pods.mirrors()).map(|pod| pod_ref(&pod).full_name()).collect()
            }
        };
        let terminating = self.workers.terminating_names();
        for name in names {
            self.reconcile_mirror_beside(&name, &terminating);
        }
    }
}

/// The pod was made of a manifest.
fn is_static(snapshot: &PodSnapshot) -> bool {
    snapshot.sandboxes.first().is_some_and(|sandbox| sandbox.is_static)
}

/// The runtime has nothing of the pod.
pub(super) fn is_empty(snapshot: &PodSnapshot) -> bool {
    snapshot.containers.is_empty() && snapshot.sandboxes.is_empty()
}
