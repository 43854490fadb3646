//! The worker registry: the mailbox of each pod worker by pod UID. Only [`super::pod_workers::PodWorkers`] inserts and
//! removes; others read summaries and wake workers.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use super::mailbox::Mailbox;
use super::state::KillOptions;
use super::state::Phase;
use super::state::Request;
use crate::model::Pod;
use crate::model::PodUid;

/// All mailboxes. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct WorkerRegistry {
    mailboxes: Arc<Mutex<HashMap<PodUid, Arc<Mailbox>>>>,
    /// Pods that are to be terminated when they are created.
    terminations: Arc<Mutex<HashMap<PodUid, KillOptions>>>,
}

/// The state of one pod worker at one moment.
#[derive(Clone, Debug)]
pub struct WorkerSummary {
    /// The worker's phase.
    pub phase: Phase,
    /// Termination was requested.
    pub terminating: bool,
    /// The newest desired pod; `None` for one that only the runtime has.
    pub pod: Option<Pod>,
}

impl WorkerRegistry {
    /// Locks the map for one lookup or change. Lock order: registry before mailbox state.
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Arc<Mailbox>>> {
        // Changed one insertion or removal at a time: a panic elsewhere leaves it usable.
        self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn terminations(&self) -> MutexGuard<'_, HashMap<PodUid, KillOptions>> {
        self.terminations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the pod terminated when it is created, before a container of it is started. Does not concern a pod that has a
    /// worker, or a static one.
    pub fn terminate_on_creation(&self, uid: PodUid, options: KillOptions) {
        self.terminations().insert(uid, options);
    }

    /// The pod is to be terminated when it is created.
    pub fn is_terminated_on_creation(&self, uid: &PodUid) -> bool {
        self.terminations().contains_key(uid)
    }

    /// Takes [`Self::terminate_on_creation`] back.
    pub fn take_termination(&self, uid: &PodUid) -> Option<KillOptions> {
        self.terminations().remove(uid)
    }

    /// The phase of the pod's worker, also of a finished one; `None` without one.
    pub fn phase(&self, uid: &PodUid) -> Option<Phase> {
        self.lock().get(uid).map(|mailbox| mailbox.state().phase())
    }

    /// The pod's worker has something to do; nothing happens without one.
    pub fn request_sync(&self, uid: &PodUid) {
        if let Some(mailbox) = self.lock().get(uid) {
            let reaction = mailbox.state().request(Request::Sync);
            mailbox.react(reaction);
        }
    }

    /// Full names (`name_namespace`) of pods that were started and are being stopped.
    pub fn terminating_names(&self) -> HashSet<String> {
        let name = |mailbox: &Arc<Mailbox>| {
            let state = mailbox.state();
            let terminating = state.termination_requested() && state.phase() < Phase::Terminated && state.was_started();
            terminating.then(|| state.pod_ref.full_name())
        };
        self.lock().values().filter_map(name).collect()
    }

    /// A summary of every worker, also of finished ones that housekeeping has not removed yet.
    pub fn summaries(&self) -> HashMap<PodUid, WorkerSummary> {
        let summary = |(uid, mailbox): (&PodUid, &Arc<Mailbox>)| {
            let state = mailbox.state();
            let terminating = state.termination_requested();
            (uid.clone(), WorkerSummary { phase: state.phase(), terminating, pod: state.pod.clone() })
        };
        self.lock().iter().map(summary).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::PodState;
    use super::*;
    use crate::model::PodRef;

    #[test]
    fn names_of_pods_that_are_being_stopped() {
        let registry = WorkerRegistry::default();
        let kill = || Request::Kill(KillOptions::default());
        type Step = fn(&mut PodState);
        let steps: [(&str, Step); 4] = [
            ("runs", |_| {}),
            ("stops", |_| {}),
            ("stopped", |state| {
                state.take_work();
                state.terminating_done();
            }),
            ("unstarted", |_| {}),
        ];
        for (name, step) in steps {
            let uid = PodUid::from(name);
            let mut state = PodState::new(PodRef { uid: uid.clone(), namespace: "ns".into(), name: name.into() });
            state.request(Request::Create(Pod::default()));
            if name != "unstarted" {
                state.start();
            }
            if name != "runs" {
                state.request(kill());
            }
            step(&mut state);
            registry.lock().insert(uid, Mailbox::new(state));
        }
        assert_eq!(registry.terminating_names(), HashSet::from(["stops_ns".to_owned()]));
    }
}
