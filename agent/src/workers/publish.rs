//! A worker's part in the pod's status. [`Worker::publish`] is the only function of a worker that publishes one; it is called
//! on each transition.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;

use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;

use super::act::PassContext;
use super::act::SyncOutcome;
use super::plan::PodCgroup;
use super::worker::Worker;
use crate::allocation::Allocations;
use crate::allocation::Progress;
use crate::allocation::report;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::QosClass;
use crate::model::SandboxStatus;
use crate::model::StartFailure;
use crate::model::qos::pod_resources;
use crate::model::resources;
use crate::model::resources::PodResources;
use crate::recorder::EventType;
use crate::status::DEADLINE_EXCEEDED;
use crate::status::DEADLINE_MESSAGE;
use crate::status::PodObservations;
use crate::status::ResizeView;

/// What a worker keeps for the pod's status, in all phases.
#[derive(Default)]
pub(super) struct StatusSources {
    /// Why containers are not running, by name (the kubelet's reason cache).
    pub(super) reasons: HashMap<String, StartFailure>,
    /// Whether the pod's own cgroup has what was allocated when it was last changed, and what that was.
    pub(super) pod_cgroup: PodCgroup,
    pod_cgroup_for: Option<PodResources>,
    /// The event of an exceeded deadline was sent.
    deadline_event_sent: AtomicBool,
}

impl StatusSources {
    /// Those of a new worker. An earlier agent that has begun a resize of the pod may have ended before the last step, which
    /// lowers the limits of the pod's cgroup: the containers alone do not show that.
    pub(super) fn new(allocations: &Allocations, uid: &PodUid) -> Self {
        let pod_cgroup = if allocations.is_in_progress(uid) { PodCgroup::Behind } else { PodCgroup::default() };
        Self { pod_cgroup, ..Self::default() }
    }
}

/// What a status shows of resizes.
struct Resizes {
    conditions: Vec<PodCondition>,
    actuated: Option<PodResources>,
    is_resizing: bool,
}

/// A transition of the pod that its status shows.
#[derive(Clone, Copy)]
pub(super) enum Transition<'a> {
    /// The pod was inspected while its containers may be started.
    Inspected,
    /// A sandbox was created. Condition PodReadyToStartContainers and the addresses do not wait for image pulls.
    SandboxCreated(&'a SandboxStatus),
    /// Containers are being stopped.
    Terminating,
    /// No process of the pod runs.
    Stopped,
    /// Volumes and, unless its sandbox exists, the cgroup are released.
    Released,
}

impl Worker {
    /// Publishes the pod's status as of the snapshot of the pass. Returns true if its phase is terminal.
    pub(super) fn publish(&self, pass: &PassContext, transition: Transition<'_>) -> bool {
        let (statuses, now) = (&self.context.statuses, self.context.clock.wall());
        self.inform_prober(pass, transition);
        let snapshot = match transition {
            Transition::Released => {
                self.context.act.allocations.clear_conditions(self.uid());
                statuses.terminate(&pass.pod, now);
                return true;
            }
            Transition::SandboxCreated(sandbox) => Cow::Owned(with_sandbox(&pass.snapshot, sandbox)),
            _ => Cow::Borrowed(&*pass.snapshot),
        };
        let reason = match transition {
            // Of the stopped pod too: its phase may have changed to Succeeded, and a reason goes with its phase.
            Transition::Terminating | Transition::Stopped => self.mailbox.state().termination_reason(),
            _ => None,
        };
        // Read here: results may change while a plan is executed.
        let probes = self.context.probes.of_pod(self.uid());
        let ends = matches!(transition, Transition::Terminating | Transition::Stopped);
        let resizes = self.resizes(pass, &snapshot, ends);
        let observations = PodObservations {
            resize: ResizeView {
                conditions: &resizes.conditions,
                actuated: resizes.actuated.as_ref(),
                is_resizing: resizes.is_resizing,
            },
            probes: Some(&probes),
            is_terminal: matches!(transition, Transition::Stopped),
            termination: reason.as_deref(),
            ..self.observations(pass, &snapshot)
        };
        let terminal = statuses.publish(&pass.pod, &snapshot, observations, now);
        if !matches!(transition, Transition::SandboxCreated(_)) {
            self.context.act.startups.published(&pass.pod, &snapshot, now);
            if terminal {
                self.send_deadline_event(pass);
            }
        }
        terminal
    }

    /// A new container has a result for each of its probes before a status shows it.
    fn inform_prober(&self, pass: &PassContext, transition: Transition<'_>) {
        let prober = &self.context.prober;
        match transition {
            Transition::Inspected => prober.observe(&pass.pod, &pass.snapshot),
            Transition::SandboxCreated(_) => {}
            Transition::Terminating => prober.terminating(&pass.pod, &pass.snapshot),
            Transition::Stopped | Transition::Released => prober.remove(self.uid()),
        }
    }

    fn observations(&self, pass: &PassContext, snapshot: &PodSnapshot) -> PodObservations<'_> {
        let handler = snapshot.sandboxes.first().map_or("", |sandbox| sandbox.runtime_handler.as_str());
        let has_resources = self.context.act.allocations.has_pod_level();
        PodObservations {
            reasons: &self.status.reasons,
            qos_class: pass.qos_class.as_ref().map_or("BestEffort", |class| QosClass::as_str(*class)),
            resources: has_resources.then(|| pod_resources(&pass.pod).ok()).flatten(),
            resize: ResizeView::default(),
            recursive_read_only: self.context.act.settings.security.handlers.recursive_read_only(handler),
            stop_signals: self.context.act.settings.stop_signals,
            is_terminal: false,
            probes: None,
            termination: None,
        }
    }

    /// How far resizes of the pod are; sends the event of one that has been completed.
    fn resizes(&self, pass: &PassContext, snapshot: &PodSnapshot, ends: bool) -> Resizes {
        let (allocations, now) = (&self.context.act.allocations, self.context.clock.wall());
        let progress = match ends {
            true => Progress::None,
            false => allocations.track(&pass.pod, snapshot, self.status.pod_cgroup == PodCgroup::Behind, now),
        };
        if let Progress::Completed(generation) = progress {
            let message = format!("Pod resize completed: {}", report(&pass.pod, generation, ""));
            self.context.recorder.pod_event(&pass.pod, "", EventType::Normal, "ResizeCompleted", &message);
        }
        Resizes {
            conditions: allocations.conditions(self.uid()),
            actuated: allocations.actuated(self.uid()),
            is_resizing: progress == Progress::InProgress,
        }
    }

    /// The pod's cgroup may have been changed for a resize that another one has replaced, such as one that an earlier agent
    /// began. Its containers do not show that.
    pub(super) fn note_replaced_resize(&mut self) {
        if self.context.act.allocations.take_replaced(self.uid()) {
            self.status.pod_cgroup = PodCgroup::Behind;
        }
    }

    /// What a plan was executed to: whether the pod's cgroup has what was allocated in this pass, and the event of a resize
    /// that failed.
    pub(super) fn remember_resize(&mut self, pass: &PassContext, outcome: &SyncOutcome) {
        let Some(is_applied) = outcome.resized else { return };
        self.status.pod_cgroup = if is_applied { PodCgroup::Current } else { PodCgroup::Behind };
        self.status.pod_cgroup_for = Some(PodResources::of(&pass.pod));
        let Some(error) = outcome.resize_error() else { return };
        let (allocations, now) = (&self.context.act.allocations, self.context.clock.wall());
        if allocations.failed(&pass.pod, &error, now) {
            let text = report(&pass.pod, pass.pod.metadata.generation, &error);
            let message = format!("Pod resize error: {text}");
            self.context.recorder.pod_event(&pass.pod, "", EventType::Warning, "ResizeError", &message);
        }
    }

    /// Whether the pod's cgroup has what is allocated now.
    pub(super) fn pod_cgroup(&self, pass: &PassContext) -> PodCgroup {
        let known = self.status.pod_cgroup;
        if known != PodCgroup::Current || self.status.pod_cgroup_for.as_ref() == Some(&PodResources::of(&pass.pod)) {
            return known;
        }
        let actuated = self.context.act.allocations.actuated(self.uid());
        match resources::is_resizing(&pass.pod, &pass.snapshot, actuated.as_ref()) {
            // It changes with them.
            true => PodCgroup::AsStarted,
            // It was changed for containers that did not run, and that resize was taken back before they were started.
            false => PodCgroup::Behind,
        }
    }

    /// Sends the event of an exceeded deadline once; the API server may have it from an earlier agent.
    fn send_deadline_event(&self, pass: &PassContext) {
        let says = |status: &PodStatus| status.reason.as_deref() == Some(DEADLINE_EXCEEDED);
        let sent = &self.status.deadline_event_sent;
        let known = pass.pod.status.as_ref().is_some_and(says) || sent.load(Ordering::Relaxed);
        if !known && self.context.statuses.stored(self.uid()).is_some_and(|stored| says(&stored.status)) {
            sent.store(true, Ordering::Relaxed);
            let recorder = &self.context.recorder;
            recorder.pod_event(&pass.pod, "", EventType::Normal, DEADLINE_EXCEEDED, DEADLINE_MESSAGE);
        }
    }
}

/// The snapshot with a newer sandbox, which replaces the others.
fn with_sandbox(snapshot: &PodSnapshot, sandbox: &SandboxStatus) -> PodSnapshot {
    let mut snapshot = snapshot.clone();
    snapshot.ips.clone_from(&sandbox.ips);
    snapshot.sandboxes.iter_mut().for_each(|old| old.ready = false);
    snapshot.sandboxes.insert(0, sandbox.clone());
    snapshot
}
