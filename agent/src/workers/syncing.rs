//! A worker's syncing phase (`SyncPod`): inspect, plan, execute, and again, until the plan is empty.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use tokio::time::Instant;

use super::act;
use super::act::PodError;
use super::act::SyncOutcome;
use super::backoff;
use super::generate::qos::pod_resources;
use super::generate::qos::qos_class;
use super::plan::PlanInput;
use super::plan::ProbeResults;
use super::plan::plan;
use super::volume_refresh::VolumeRefresh;
use super::volume_refresh::earliest;
use super::worker::Next;
use super::worker::Worker;
use crate::cgroups::QosClass;
use crate::model::ContainerClass;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::Pod;
use crate::model::PodActions;
use crate::model::PodSnapshot;
use crate::model::SandboxStatus;
use crate::model::StartContainer;
use crate::model::StartFailure;
use crate::model::spec;
use crate::recorder::EventType;
use crate::retry::Operation;
use crate::status::PodObservations;

/// State of the syncing phase between passes.
#[derive(Default)]
pub(super) struct SyncState {
    /// Why containers are not running, by name (the kubelet's reason cache).
    pub reasons: HashMap<String, StartFailure>,
    /// When the event of a container's crash-loop back-off was last sent, by name.
    event_sent: HashMap<String, Instant>,
    pub probes: ProbeResults,
    /// The event of an exceeded deadline was sent.
    pub deadline_event_sent: bool,
    /// Containers started since the last snapshot.
    pub started: Vec<ContainerId>,
    /// Refresh state of the pod's volumes.
    pub volumes: VolumeRefresh,
}

impl Worker {
    /// Executes plans until there is nothing to do for now.
    pub(super) async fn sync(&mut self) -> Next {
        let next = self.sync_until_settled().await;
        // Whatever else the worker waits for: `activeDeadlineSeconds` is noticed when it passes.
        let deadline = self.pod().and_then(|pod| self.context.statuses.active_deadline(&pod)).map(|at| self.at(at));
        let deadline = deadline.filter(|at| *at > Instant::now());
        match next {
            Next::Wait(due) => Next::Wait(earliest(due, deadline)),
            Next::Retry(due) => Next::Retry(deadline.map_or(due, |deadline| due.min(deadline))),
            Next::Phase => Next::Phase,
        }
    }

    async fn sync_until_settled(&mut self) -> Next {
        let mut before: Option<PodActions> = None;
        loop {
            self.runtime_ready().await;
            if self.context.shutdown.is_cancelled() {
                return Next::Wait(None);
            }
            let Some(pod) = self.pod() else { return Next::Wait(None) };
            if self.mailbox.state().termination_requested() {
                // Another request is already waiting.
                return Next::Phase;
            }
            self.register_objects(&pod);
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
            let (actions, blocked) = self.take_blocked_starts(&pod, actions);
            if actions.is_idle() {
                self.publish_status(&pod, &view, false);
                let again = self.collect_garbage(&view).await;
                let due = blocked.map(|until| self.recheck_at(until));
                return Next::Wait(earliest(earliest(due, again), self.refresh_volumes(&pod).await));
            }
            if before.as_ref() == Some(&actions) {
                // It was executed without an error and changed nothing: a loop without a pause.
                return self.retry(Operation::SyncPod, "executing the plan changed nothing");
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

    /// Executes a plan. `None` means: inspect and plan again at once.
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
        let before_pull = |sandbox: &SandboxStatus| self.publish_sandbox(pod, view, sandbox);
        let outcome = act::execute_observed(&self.context.act, pod, actions, view, &before_pull).await;
        self.acted();
        self.context.observer.acted(began.elapsed(), &outcome);
        self.remember(&outcome);
        if outcome.is_ok() {
            return None;
        }
        let starts = outcome.starts.iter().filter_map(|start| start.result.as_ref().err()).map(ToString::to_string);
        let reason = outcome.errors.iter().map(ToString::to_string).chain(starts).collect::<Vec<_>>().join(", ");
        let after = self.view().await;
        if let Ok(after) = &after {
            self.publish_status(pod, after, false);
        }
        // Container exits and requests wake the worker; this is for what just failed.
        match blocked {
            None if outcome.volumes_not_ready() => {
                tracing::debug!(pod = %self.pod_ref(), reason, "volumes are not ready");
                Some(Next::Wait(Some(self.volumes_failed())))
            }
            None if outcome.network_not_ready() => Some(self.retry(Operation::AwaitNetwork, &reason)),
            None => Some(self.retry(Operation::SyncPod, &reason)),
            Some(until) => {
                let due = self.recheck_at(until);
                match self.retry(Operation::SyncPod, &reason) {
                    Next::Retry(retry) => Some(Next::Retry(retry.min(due))),
                    next => Some(next),
                }
            }
        }
    }

    /// The plan is empty: collects garbage, and wakes for what time alone changes.
    async fn settled(&mut self, pod: &Pod, view: &Arc<PodSnapshot>) -> Next {
        self.syncing.reasons.retain(|name, _| view.newest(name).is_none_or(|c| c.state != ContainerState::Running));
        let again = self.collect_garbage(view).await;
        Next::Wait(earliest(again, self.refresh_volumes(pod).await))
    }

    /// Removes exited instances beyond the newest of each container, and replaced sandboxes. Returns when to retry if
    /// something could not be removed.
    pub(super) async fn collect_garbage(&mut self, view: &PodSnapshot) -> Option<Instant> {
        if !act::gc::has_garbage(view) {
            return None;
        }
        let target = self.pod_ref().with_uid();
        if let Some(due) = self.context.retries.due(Operation::CollectGarbage, &target) {
            return Some(due);
        }
        self.context.pleg.acting(&self.uid).await;
        let errors = act::gc::collect_garbage(&self.context.act, view).await;
        self.acted();
        let due = if errors.is_empty() {
            self.context.retries.succeeded(Operation::CollectGarbage, &target);
            None
        } else {
            let reason = act::joined(&errors);
            self.context.recorder.node_event(EventType::Warning, "ContainerGCFailed", &reason);
            Some(self.context.retries.failed(Operation::CollectGarbage, &target, &reason))
        };
        if let Err(error) = self.context.pleg.inspect(&self.uid).await {
            tracing::debug!(pod = %self.pod_ref(), %error, "cannot inspect the pod after garbage collection");
        }
        due
    }

    /// A start counts for crash-loop back-off when it is attempted, also if it then fails.
    fn record_starts(&mut self, pod: &Pod, actions: &PodActions) {
        let now = self.context.clock.wall();
        for start in actions.start.iter().filter(|s| s.blocked.is_none()) {
            let Some(finished) = start.last_finished_at else { continue };
            let mut containers = spec::init_containers(pod).iter().chain(spec::regular_containers(pod));
            let Some(container) = containers.find(|c| c.name == start.name) else { continue };
            self.history.record(&backoff::crash_loop_key(pod, container), backoff::wall_time(finished), now);
        }
    }

    /// Removes starts blocked by back-off from the plan, and shows them as waiting; returns when the first is due.
    fn take_blocked_starts(&mut self, pod: &Pod, mut actions: PodActions) -> (PodActions, Option<SystemTime>) {
        let blocked: Vec<StartContainer> = actions.start.extract_if(.., |start| start.blocked.is_some()).collect();
        let mut first = None;
        for start in &blocked {
            let Some((block, error)) = start.blocked.as_ref().zip(PodError::crash_loop_back_off(pod, start)) else {
                continue;
            };
            first = Some(first.map_or(block.until, |first: SystemTime| first.min(block.until)));
            let failure = StartFailure::from(&error);
            let known = self.syncing.reasons.insert(start.name.clone(), failure.clone());
            // The runtime's own finish time moves the end of the back-off a little; the message is the same.
            let new = known.is_none_or(|known| known.message != failure.message);
            let sent = self.syncing.event_sent.get(&start.name);
            if new || sent.is_none_or(|sent| sent.elapsed() >= BACK_OFF_EVENT_PERIOD) {
                self.syncing.event_sent.insert(start.name.clone(), Instant::now());
                if let Some(event) = error.event() {
                    let recorder = &self.context.recorder;
                    recorder.pod_event(pod, &field_path(start), event.kind, event.reason, &event.message);
                }
            }
        }
        (actions, first)
    }

    /// The next pass over a pod with a start blocked until `until`; at least one per sync period repeats the event.
    fn recheck_at(&self, until: SystemTime) -> Instant {
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

    /// Publishes the pod's status with a sandbox that is newer than `view`: condition PodReadyToStartContainers and the
    /// addresses do not wait for image pulls.
    fn publish_sandbox(&self, pod: &Pod, view: &PodSnapshot, sandbox: &SandboxStatus) {
        let mut view = view.clone();
        view.ips.clone_from(&sandbox.ips);
        view.sandboxes.iter_mut().for_each(|old| old.ready = false);
        view.sandboxes.insert(0, sandbox.clone());
        self.context.statuses.publish(pod, &view, self.observations(pod, &view, false), self.context.clock.wall());
    }

    /// Publishes the pod's status as of `view`. Returns true if its phase is terminal.
    pub(super) fn publish_status(&mut self, pod: &Pod, view: &PodSnapshot, terminal: bool) -> bool {
        let observations = self.observations(pod, view, terminal);
        let now = self.context.clock.wall();
        let terminal = self.context.statuses.publish(pod, view, observations, now);
        self.context.act.startups.published(pod, view, now);
        if terminal {
            self.send_deadline_event(pod);
        }
        terminal
    }

    fn observations(&self, pod: &Pod, view: &PodSnapshot, is_terminal: bool) -> PodObservations<'_> {
        let handler = view.sandboxes.first().map_or("", |sandbox| sandbox.runtime_handler.as_str());
        PodObservations {
            reasons: &self.syncing.reasons,
            qos_class: qos_class(pod).map_or("BestEffort", QosClass::as_str),
            resources: pod_resources(pod).ok(),
            recursive_read_only: self.context.act.settings.security.handlers.recursive_read_only(handler),
            is_terminal,
        }
    }

    /// Sends the event of an exceeded deadline once; the API server may have it from an earlier agent.
    fn send_deadline_event(&mut self, pod: &Pod) {
        let (reason, message) = DEADLINE;
        let says = |status: &k8s_openapi::api::core::v1::PodStatus| status.reason.as_deref() == Some(reason);
        let known = pod.status.as_ref().is_some_and(says) || self.syncing.deadline_event_sent;
        if !known && self.context.statuses.get(&self.uid).as_ref().is_some_and(says) {
            self.syncing.deadline_event_sent = true;
            self.context.recorder.pod_event(pod, "", EventType::Normal, reason, message);
        }
    }
}

/// The event of a blocked start is repeated after this at the earliest.
const BACK_OFF_EVENT_PERIOD: Duration = Duration::from_secs(1);

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
