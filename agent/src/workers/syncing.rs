//! A worker's syncing phase: look, decide, act, look again, until the pod is as it should be.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use tokio::time::Instant;

use super::act;
use super::backoff;
use super::generate::names;
use super::generate::qos::pod_resources;
use super::generate::qos::qos_class;
use super::plan::PlanInput;
use super::plan::ProbeResults;
use super::plan::plan;
use super::upkeep::Kept;
use super::upkeep::earliest;
use super::worker::Next;
use super::worker::Worker;
use crate::kernel::cgroup::QosClass;
use crate::model::ContainerClass;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::Pod;
use crate::model::PodActions;
use crate::model::PodSnapshot;
use crate::model::StartContainer;
use crate::model::StartFailure;
use crate::model::SyncOutcome;
use crate::model::spec;
use crate::recorder::EventType;
use crate::status::PodObservations;

/// What the syncing phase remembers between passes.
#[derive(Default)]
pub(super) struct Memory {
    /// Why containers are not running, by name: upstream's reason cache.
    pub reasons: HashMap<String, StartFailure>,
    /// When it was last told that a container is held back, by name.
    told_held: HashMap<String, Instant>,
    pub probes: ProbeResults,
    /// The event of an exceeded deadline was told.
    pub deadline_told: bool,
    /// What was started since the last look.
    pub started: Vec<ContainerId>,
    /// How far the pod's volumes are up to date.
    pub volumes: Kept,
}

impl Worker {
    /// Brings the pod to where it should be. Returns when nothing is left to do for now.
    pub(super) async fn sync(&mut self) -> Next {
        let mut before: Option<PodActions> = None;
        loop {
            self.runtime_ready().await;
            if self.context.ending.is_cancelled() {
                return Next::Wait(None);
            }
            let Some(pod) = self.pod() else { return Next::Wait(None) };
            if self.mailbox.state().termination_requested() {
                // Another request is already waiting.
                return Next::Phase;
            }
            self.claim_objects(&pod);
            let view = match self.view().await {
                Ok(view) => view,
                Err(error) => return self.failed_sync(&pod, &error),
            };
            if self.publish_status(&pod, &view, false) {
                self.mailbox.state().sync_was_terminal(Instant::now());
                return Next::Phase;
            }
            let actions = self.decide(&pod, &view);
            if actions.is_idle() {
                return self.settled(&pod, &view).await;
            }
            let (actions, blocked) = self.hold_back(&pod, actions);
            if actions.is_idle() {
                self.publish_status(&pod, &view, false);
                let again = self.tidy(&view).await;
                let due = blocked.map(|until| self.look_again(until));
                return Next::Wait(earliest(earliest(due, again), self.keep_volumes(&pod).await));
            }
            if before.as_ref() == Some(&actions) {
                // It was carried out without an error and has changed nothing: not again at once.
                tracing::warn!(pod = %self.pod_ref(), "a plan had no effect");
                return self.retry(false);
            }
            if let Some(next) = self.execute(&pod, &view, &actions, blocked).await {
                return next;
            }
            before = Some(actions);
        }
    }

    fn decide(&self, pod: &Pod, view: &PodSnapshot) -> PodActions {
        let began = Instant::now();
        let actions = plan(&PlanInput {
            pod,
            snapshot: view,
            history: &self.history,
            probes: &self.syncing.probes,
            restarting_all: self.context.statuses.restarting_all(&self.uid),
            gates: self.context.gates,
            now: self.context.clock.wall(),
        });
        self.context.observer.planned(began.elapsed());
        actions
    }

    /// Executes a plan. `None` means: look and decide again at once.
    async fn execute(
        &mut self,
        pod: &Pod,
        view: &Arc<PodSnapshot>,
        actions: &PodActions,
        blocked: Option<SystemTime>,
    ) -> Option<Next> {
        let began = Instant::now();
        self.record_starts(pod, actions);
        self.context.pleg.acting(&self.uid).await;
        let outcome = act::execute(&self.context.act, pod, actions, view).await;
        self.acted();
        self.context.observer.acted(began.elapsed(), &outcome);
        self.remember(&outcome);
        if outcome.is_ok() {
            return None;
        }
        for error in &outcome.errors {
            tracing::warn!(pod = %self.pod_ref(), error, "pod sync failed");
        }
        let after = self.view().await;
        if let Ok(after) = &after {
            self.publish_status(pod, after, false);
        }
        // Another container's death or a request has its own wake-up; this is for what just failed.
        match blocked {
            Some(until) => Some(Next::Wait(Some(self.look_again(until)))),
            None if outcome.volumes_not_ready => Some(Next::Wait(Some(self.volumes_failed()))),
            None => Some(self.retry(outcome.network_not_ready)),
        }
    }

    /// Nothing to do: tidy up, and wake for what time alone will change.
    async fn settled(&mut self, pod: &Pod, view: &Arc<PodSnapshot>) -> Next {
        self.syncing.reasons.retain(|name, _| view.newest(name).is_none_or(|c| c.state != ContainerState::Running));
        let again = self.tidy(view).await;
        let deadline = self.context.statuses.active_deadline(pod).map(|at| self.at(at));
        Next::Wait(earliest(earliest(deadline, again), self.keep_volumes(pod).await))
    }

    /// Removes dead instances beyond the newest one of each container, and sandboxes that were replaced, now that nothing
    /// more urgent is to be done. Returns when to try again if something could not be removed.
    pub(super) async fn tidy(&mut self, view: &PodSnapshot) -> Option<Instant> {
        if !act::gc::is_untidy(view) {
            return None;
        }
        self.context.pleg.acting(&self.uid).await;
        let errors = act::gc::tidy(&self.context.act, view).await;
        self.acted();
        if !errors.is_empty() {
            self.context.recorder.node_event(EventType::Warning, "ContainerGCFailed", &errors.join(", "));
        }
        if let Err(error) = self.context.pleg.inspect(&self.uid).await {
            tracing::debug!(pod = %self.pod_ref(), %error, "the tidied pod could not be looked at");
        }
        (!errors.is_empty()).then(|| Instant::now() + act::gc::PERIOD)
    }

    /// A start counts for the back-off when it is attempted, also if it then fails.
    fn record_starts(&mut self, pod: &Pod, actions: &PodActions) {
        let now = self.context.clock.wall();
        for start in actions.start.iter().filter(|s| s.blocked.is_none()) {
            let Some(finished) = start.last_finished_at else { continue };
            let mut containers = spec::init_containers(pod).iter().chain(spec::regular_containers(pod));
            let Some(container) = containers.find(|c| c.name == start.name) else { continue };
            self.history.record(&backoff::crash_loop_key(pod, container), backoff::wall_time(finished), now);
        }
    }

    /// Takes starts that the back-off forbids out of the plan and makes them visible; returns when the first of them
    /// is due.
    fn hold_back(&mut self, pod: &Pod, mut actions: PodActions) -> (PodActions, Option<SystemTime>) {
        let blocked: Vec<StartContainer> = actions.start.extract_if(.., |start| start.blocked.is_some()).collect();
        let mut first = None;
        for start in &blocked {
            let Some(block) = &start.blocked else { continue };
            first = Some(first.map_or(block.until, |first: SystemTime| first.min(block.until)));
            let failure = StartFailure {
                token: "CrashLoopBackOff".to_owned(),
                message: backoff::crash_loop_message(pod, &start.name, block.backoff),
                retry_at: Some(block.until),
            };
            let known = self.syncing.reasons.insert(start.name.clone(), failure.clone());
            // The runtime's own finish time moves the end of the back-off a little; that is no news.
            let new = known.is_none_or(|known| known.message != failure.message);
            let told = self.syncing.told_held.get(&start.name);
            if new || told.is_none_or(|told| told.elapsed() >= TELL_PERIOD) {
                self.syncing.told_held.insert(start.name.clone(), Instant::now());
                let described = names::describe(pod);
                let message = format!("Back-off restarting failed container {} in pod {described}", start.name);
                self.context.recorder.pod_event(pod, &field_path(start), EventType::Warning, "BackOff", &message);
            }
        }
        (actions, first)
    }

    /// When a pod with a container that is held back until `until` is looked at next: meanwhile, too, it is told of.
    fn look_again(&self, until: SystemTime) -> Instant {
        let period = self.context.sync_frequency.mul_f64(1.0 + fastrand::f64() * 0.5);
        self.at(until).min(Instant::now() + period)
    }

    fn remember(&mut self, outcome: &SyncOutcome) {
        for start in &outcome.starts {
            match &start.result {
                Ok(id) => {
                    self.syncing.started.push(id.clone());
                    self.syncing.reasons.remove(&start.name)
                }
                Err(failure) => self.syncing.reasons.insert(start.name.clone(), failure.clone()),
            };
        }
    }

    /// Publishes the pod's status as of `view`. Returns true if its phase is terminal.
    pub(super) fn publish_status(&mut self, pod: &Pod, view: &PodSnapshot, terminal: bool) -> bool {
        let resources = pod_resources(pod).ok();
        let handler = view.sandboxes.first().map_or("", |sandbox| sandbox.runtime_handler.as_str());
        let observations = PodObservations {
            reasons: &self.syncing.reasons,
            qos_class: qos_class(pod).map_or("BestEffort", QosClass::as_str),
            resources: resources.as_ref(),
            recursive_read_only: self.context.act.settings.security.handlers.recursive_read_only(handler),
            is_terminal: terminal,
        };
        let now = self.context.clock.wall();
        let terminal = self.context.statuses.publish(pod, view, observations, now);
        self.context.act.startups.published(pod, view, now);
        if terminal {
            self.tell_deadline(pod);
        }
        terminal
    }

    /// A pod that ran into its deadline says so once: the API server may know already.
    fn tell_deadline(&mut self, pod: &Pod) {
        let (reason, message) = DEADLINE;
        let says = |status: &k8s_openapi::api::core::v1::PodStatus| status.reason.as_deref() == Some(reason);
        let known = pod.status.as_ref().is_some_and(says) || self.syncing.deadline_told;
        if !known && self.context.statuses.get(&self.uid).as_ref().is_some_and(says) {
            self.syncing.deadline_told = true;
            self.context.recorder.pod_event(pod, "", EventType::Normal, reason, message);
        }
    }
}

/// The same back-off is told again after so long at the soonest: upstream's workers come round no more often.
const TELL_PERIOD: Duration = Duration::from_secs(1);

/// `status.reason` and message of a pod that ran into `activeDeadlineSeconds`.
const DEADLINE: (&str, &str) = ("DeadlineExceeded", "Pod was active on the node longer than the specified deadline");

fn field_path(start: &StartContainer) -> String {
    let list = match start.class {
        ContainerClass::Regular => "containers",
        ContainerClass::Init | ContainerClass::Sidecar => "initContainers",
        ContainerClass::Ephemeral => "ephemeralContainers",
    };
    format!("spec.{list}{{{}}}", start.name)
}
