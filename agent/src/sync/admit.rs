//! Admission in the sync loop: decides once per pod UID, stores the decision, and publishes the status of rejected pods.
//!
//! A pod can be rejected although its containers run, where this agent replaced another kubelet. Such a pod is not
//! killed: it runs on unmanaged until it is deleted or removed, and then terminates with its own grace period. Once no
//! container of it runs it fails like any rejected pod.

use std::collections::HashSet;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::task::SyncLoop;
use crate::admission;
use crate::admission::Decisions;
use crate::admission::Input;
use crate::admission::NodeOffer;
use crate::admission::Rejection;
use crate::cgroups::QosClass;
use crate::model::Backoff;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::pleg::PlegHandle;
use crate::recorder::EventType;
use crate::workers::generate::qos::qos_class;
use crate::workers::state::is_terminal;

/// Pauses between attempts to get a first list from a runtime that fails.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The decisions of the sync loop, and what they are based on.
pub struct PodAdmission {
    offer: watch::Receiver<NodeOffer>,
    decisions: Decisions,
    /// Rejected pods whose event is recorded.
    announced: HashSet<PodUid>,
    /// The PLEG has listed all pods: one that is not in its cache does not run.
    listed: bool,
    first_list: JoinSet<()>,
}

impl PodAdmission {
    /// No decisions yet. Each is based on what `offer` holds at that time.
    pub fn new(offer: watch::Receiver<NodeOffer>) -> Self {
        Self {
            offer,
            decisions: Decisions::default(),
            announced: HashSet::new(),
            listed: false,
            first_list: JoinSet::new(),
        }
    }

    /// The pod was rejected.
    pub(super) fn is_rejected(&self, uid: &PodUid) -> bool {
        self.decisions.rejection(uid).is_some()
    }

    /// The source removed the pod: its UID is decided on again if it comes back.
    pub(super) fn remove(&mut self, uid: &PodUid) {
        self.decisions.remove(uid);
        self.announced.remove(uid);
    }

    /// Waits until the PLEG has listed all pods, if that was asked for. Cancel-safe.
    pub(super) async fn first_list(&mut self) {
        match self.first_list.join_next().await {
            Some(_) => self.listed = true,
            None => std::future::pending().await,
        }
    }

    fn await_first_list(&mut self, uid: &PodUid, pleg: &PlegHandle) {
        if self.first_list.is_empty() {
            let (uid, pleg) = (uid.clone(), pleg.clone());
            self.first_list.spawn(async move {
                let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
                while pleg.view(&uid).await.is_err() {
                    tokio::time::sleep(backoff.failed(0.0)).await;
                }
            });
        }
    }
}

impl SyncLoop {
    /// Whether the pod may have a worker. A pod that is to be deleted, or had ended before the agent knew it, needs one in
    /// any case: admission does not concern its end.
    pub(super) fn admit(&mut self, pod: &Pod) -> bool {
        let uid = pod_ref(pod).uid;
        if spec::deletion_requested(pod) || self.workers.knows(&uid) {
            return true;
        }
        if !self.admission.decisions.contains(&uid) {
            if is_terminal(pod) {
                return true;
            }
            let (shutting_down, pressures) = (*self.requests.closed.borrow(), *self.requests.pressures.borrow());
            let node = NodeOffer { shutting_down, pressures, ..self.admission.offer.borrow().clone() };
            // A pod whose class cannot be computed is rejected when it is started.
            let best_effort = qos_class(pod).is_ok_and(|class| class == QosClass::BestEffort);
            self.admission.decisions.store(uid.clone(), admission::decide(Input { pod, best_effort, node: &node }));
            if let Some(Rejection { reason, .. }) = self.admission.decisions.rejection(&uid) {
                self.workers.rejected(reason);
                self.settle_rejected(&uid);
            }
        }
        !self.admission.is_rejected(&uid)
    }

    /// Publishes the status of a rejected pod without worker: Failed, or Running and unmanaged while a container of it
    /// runs.
    pub(super) fn settle_rejected(&mut self, uid: &PodUid) {
        let Some(Rejection { reason, message }) = self.admission.decisions.rejection(uid).cloned() else { return };
        let Some(pod) = self.pods.by_uid(uid).filter(|_| !self.workers.knows(uid)) else { return };
        let snapshot = self.pleg.cached(uid);
        if snapshot.is_none() && !self.admission.listed {
            return self.admission.await_first_list(uid, &self.pleg);
        }
        let now = self.clock.wall();
        let runs = snapshot.as_ref().is_some_and(|snapshot| snapshot.running().next().is_some());
        let sandbox = snapshot.as_ref().is_some_and(|snapshot| snapshot.sandboxes.iter().any(|sandbox| sandbox.ready));
        let text = match runs {
            true => format!("{message}; its containers run on unmanaged until the pod is deleted"),
            false => message,
        };
        if self.admission.announced.insert(uid.clone()) {
            self.recorder.pod_event(&pod, "", EventType::Warning, reason, &text);
        }
        if runs {
            self.statuses.mark_unmanaged(&pod, reason, &text, now);
        } else {
            self.statuses.reject(&pod, reason, &text, sandbox, now);
        }
    }

    /// The same for all rejected pods.
    pub(super) fn settle_all_rejected(&mut self) {
        let rejected: Vec<PodUid> = self.admission.decisions.rejected().cloned().collect();
        rejected.iter().for_each(|uid| self.settle_rejected(uid));
    }
}
