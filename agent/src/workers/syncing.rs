//! A worker's syncing phase (`SyncPod`): inspect, plan, execute, and again, until the plan is empty.

use std::collections::HashSet;
use std::time::SystemTime;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::act;
use super::act::PassContext;
use super::act::PodError;
use super::act::SyncOutcome;
use super::backoff;
use super::plan::PlanInput;
use super::plan::plan;
use super::publish::Transition;
use super::sync_state::SyncState;
use super::sync_state::last_exited;
use super::volume_refresh::earliest;
use super::worker::Next;
use super::worker::Worker;
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

impl Worker {
    /// Executes plans until there is nothing to do for now.
    pub(super) async fn sync(&mut self, state: &mut SyncState) -> Next {
        let next = self.sync_until_settled(state).await;
        // Whatever else the worker waits for: `activeDeadlineSeconds` is noticed when it passes.
        let deadline = self.pod().and_then(|pod| self.context.statuses.active_deadline(&pod));
        let deadline = state.deadline.set(deadline, Instant::now(), self.context.clock.wall());
        match next {
            Next::Wait(due) => Next::Wait(earliest(due, deadline)),
            Next::Retry(due) => Next::Retry(deadline.map_or(due, |deadline| due.min(deadline))),
            Next::Phase => Next::Phase,
        }
    }

    async fn sync_until_settled(&mut self, state: &mut SyncState) -> Next {
        let mut before: Option<PodActions> = None;
        loop {
            if self.ends_before_runtime_is_ready().await {
                self.mailbox.state().sync_was_terminal();
                return Next::Phase;
            }
            if self.context.shutdown.is_cancelled() {
                return Next::Wait(None);
            }
            let Some((pod, content)) = self.pod_with_content() else { return Next::Wait(None) };
            if self.mailbox.state().termination_requested() {
                // Another request is already waiting.
                return Next::Phase;
            }
            self.register_objects(&mut state.volumes, &pod, content);
            self.note_replaced_resize();
            let pass = match self.view().await {
                Ok(view) => self.pass_context(pod, view),
                Err(error) => return self.failed_sync(&pod, &error),
            };
            if self.publish(&pass, Transition::Inspected) {
                self.mailbox.state().sync_was_terminal();
                return Next::Phase;
            }
            let actions = self.decide(&pass);
            if actions.is_idle() {
                return self.settled(&pass, state).await;
            }
            if let Some(due) = state.restart_all_due(&actions) {
                return Next::Wait(Some(due));
            }
            if let Some(due) = state.sandbox_due(&actions) {
                // Sandboxes that were replaced would stay until the pod is settled, which may never happen.
                let again = self.collect_garbage(&pass.snapshot).await;
                // Does not count as a success: the pauses after earlier failures continue to grow.
                return Next::Retry(again.map_or(due, |again| due.min(again)));
            }
            let (actions, blocked) = self.take_blocked_starts(&pass, state, actions);
            if actions.is_idle() {
                self.publish(&pass, Transition::Inspected);
                let again = self.collect_garbage(&pass.snapshot).await;
                let due = blocked.map(|until| self.recheck_at(until));
                let refresh = self.refresh_volumes(&mut state.volumes, &pass.pod);
                return Next::Wait(earliest(earliest(due, again), refresh));
            }
            if before.as_ref() == Some(&actions) {
                // It was executed without an error and changed nothing: a loop without a pause.
                let next = self.retry(Operation::SyncPod, "executing the plan changed nothing");
                return self.beside_failure(next, &pass, state).await;
            }
            if let Some(next) = self.execute(&pass, state, &actions, blocked).await {
                return self.beside_failure(next, &pass, state).await;
            }
            before = Some(actions);
        }
    }

    /// Waits until the runtime is ready, the pod's termination is requested, or the agent stops. Meanwhile the status shows the
    /// exits that the kernel proves. Returns whether the pod has ended by them.
    async fn ends_before_runtime_is_ready(&mut self) -> bool {
        while !self.context.runtime.borrow().is_ready() && !self.context.shutdown.is_cancelled() {
            if self.mailbox.state().termination_requested() {
                return false;
            }
            if self.publish_cached().await {
                return true;
            }
            tokio::select! {
                () = self.runtime_ready() => {}
                // What woke it is still pending for the next pass.
                () = self.mailbox.woken() => {}
            }
        }
        false
    }

    /// Publishes what is cached of the pod since the worker's last action. Returns whether the pod has ended.
    async fn publish_cached(&mut self) -> bool {
        if !self.has_view() {
            return false;
        }
        // A first status needs to know what the runtime supports.
        let Some(pod) = self.pod().filter(|_| self.context.statuses.stored(self.uid()).is_some()) else { return false };
        self.note_replaced_resize();
        match self.view().await {
            Ok(view) => self.publish(&self.pass_context(pod, view), Transition::Inspected),
            Err(_) => false,
        }
    }

    fn decide(&self, pass: &PassContext) -> PodActions {
        let began = Instant::now();
        let actions = plan(&PlanInput {
            pod: &pass.pod,
            snapshot: &pass.snapshot,
            history: &self.history,
            probes: &self.context.probes.of_pod(self.uid()),
            actuated: self.context.act.allocations.actuated(self.uid()).as_ref(),
            pod_cgroup: self.pod_cgroup(pass),
            resizes_init: self.context.act.allocations.resizes(ContainerClass::Init),
            restarting_all: self.context.statuses.restarting_all(self.uid()),
            gates: self.context.gates,
            now: self.context.clock.wall(),
        });
        self.context.observer.planned(began.elapsed());
        actions
    }

    /// Executes a plan. `None` means: inspect and plan again at once.
    async fn execute(
        &mut self,
        pass: &PassContext,
        state: &mut SyncState,
        actions: &PodActions,
        blocked: Option<SystemTime>,
    ) -> Option<Next> {
        let (began, began_at) = (Instant::now(), self.context.clock.wall());
        self.context.pleg.acting(self.uid()).await;
        let before_pull = |sandbox: &SandboxStatus| {
            self.publish(pass, Transition::SandboxCreated(sandbox));
        };
        let requested = CancellationToken::new();
        let terminated = async {
            while !self.mailbox.state().termination_requested() {
                self.mailbox.cancelled().await;
            }
            requested.cancel();
        };
        let execution = act::execute_observed(&self.context.act, pass, actions, &before_pull, terminated);
        let outcome = match actions.stops_containers() {
            true => self.with_termination(pass, execution, &requested).await,
            false => execution.await,
        };
        self.record_starts(&pass.pod, actions, &outcome, began_at);
        state.executed(&pass.snapshot, &outcome);
        let started = self.remember(&outcome);
        self.remember_resize(pass, &outcome);
        let resized = actions.resize.iter().flat_map(|resize| resize.memory.iter().chain(&resize.cpu));
        self.acted_on(started, resized.map(|container| container.id.clone()).collect());
        self.context.observer.acted(began.elapsed(), &outcome);
        if outcome.is_ok() {
            return None;
        }
        if let Ok(after) = self.view().await {
            self.publish(&pass.with_snapshot(after), Transition::Inspected);
        }
        Some(self.after_failure(state, &outcome, blocked))
    }

    /// What follows a plan that failed. `blocked`: when the first start is due that back-off holds.
    fn after_failure(&mut self, state: &mut SyncState, outcome: &SyncOutcome, blocked: Option<SystemTime>) -> Next {
        let reason = failures(outcome);
        // Container exits and requests wake the worker; this is for what just failed.
        let operation = if outcome.network_not_ready() { Operation::AwaitNetwork } else { Operation::SyncPod };
        let first = [blocked, outcome.retry_at()].into_iter().flatten().min();
        if let Some(until) = first.filter(|_| outcome.is_held_back()) {
            return Next::Retry(self.recheck_at(until));
        }
        match first {
            None if outcome.volumes_not_ready() => {
                tracing::debug!(pod = %self.pod_ref, reason, "volumes are not ready");
                Next::Wait(Some(state.volumes.failed(outcome.claims_not_ready())))
            }
            None => self.retry(operation, &reason),
            Some(until) => {
                let due = self.recheck_at(until);
                match self.retry(operation, &reason) {
                    Next::Retry(retry) => Next::Retry(retry.min(due)),
                    next => next,
                }
            }
        }
    }

    /// The plan fails for now: does what does not depend on it, which is to collect garbage and to begin to refresh the volumes
    /// of containers that run. Returns when the pod is synced again.
    async fn beside_failure(&mut self, next: Next, pass: &PassContext, state: &mut SyncState) -> Next {
        // Volumes that could not be set up are waited for: that set-up has refreshed the others.
        let Next::Retry(retry) = next else { return next };
        let again = match self.view().await {
            Ok(view) => self.collect_garbage(&view).await,
            Err(_) => None,
        };
        let refresh = match pass.snapshot.running().next() {
            Some(_) => self.refresh_volumes(&mut state.volumes, &pass.pod),
            None => None,
        };
        Next::Retry([again, refresh].into_iter().flatten().fold(retry, Instant::min))
    }

    /// The plan is empty: collects garbage, and wakes for what time alone changes.
    async fn settled(&mut self, pass: &PassContext, state: &mut SyncState) -> Next {
        self.forget_reasons_of_running(&pass.snapshot);
        let again = self.collect_garbage(&pass.snapshot).await;
        Next::Wait(earliest(again, self.refresh_volumes(&mut state.volumes, &pass.pod)))
    }

    /// Removes exited instances beyond the limits on dead containers, and replaced sandboxes. Returns when the next is due:
    /// an instance is old enough then, or something could not be removed and is retried.
    pub(super) async fn collect_garbage(&mut self, view: &PodSnapshot) -> Option<Instant> {
        let next = act::gc::next_garbage(&self.context.act, view).map(|at| self.at(at));
        if !act::gc::has_garbage(&self.context.act, view) {
            return next;
        }
        let target = self.pod_ref.with_uid();
        if let Some(due) = self.context.retries.due(Operation::CollectGarbage, &target) {
            return earliest(Some(due), next);
        }
        self.context.pleg.acting(self.uid()).await;
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
        if let Err(error) = self.context.pleg.inspect(self.uid()).await {
            tracing::debug!(pod = %self.pod_ref, %error, "cannot inspect the pod after garbage collection");
        }
        earliest(due, next)
    }

    /// A start counts for crash-loop back-off when it is attempted, also if it then fails. One that is not attempted, for
    /// lack of the network, a volume or the sandbox, does not count. `began_at` is when the plan was begun.
    fn record_starts(&mut self, pod: &Pod, actions: &PodActions, outcome: &SyncOutcome, began_at: SystemTime) {
        let tried: HashSet<&str> = outcome.starts.iter().map(|tried| tried.name.as_str()).collect();
        let containers = spec::lasting_by_name(pod);
        let is_attempted = |start: &&StartContainer| tried.contains(start.name.as_str());
        for start in actions.start.iter().filter(|start| start.blocked.is_none()).filter(is_attempted) {
            let Some(finished) = start.last_finished_at else { continue };
            let Some(container) = containers.get(start.name.as_str()) else { continue };
            self.history.record(&backoff::crash_loop_key(pod, container.spec), backoff::wall_time(finished), began_at);
        }
    }

    /// Removes starts blocked by back-off from the plan, and shows them as waiting; returns when the first of them is due, or is
    /// to be shown as waiting instead of failed.
    fn take_blocked_starts(
        &mut self,
        pass: &PassContext,
        state: &mut SyncState,
        mut actions: PodActions,
    ) -> (PodActions, Option<SystemTime>) {
        state.bound_back_offs(&mut actions, self.context.clock.wall());
        let blocked: Vec<StartContainer> = actions.start.extract_if(.., |start| start.blocked.is_some()).collect();
        let (last_exited, mut first) = (last_exited(&pass.snapshot), None);
        for start in &blocked {
            let Some(block) = &start.blocked else { continue };
            let shown = state.failure_shown_for(&last_exited, &start.name);
            let due = shown.map_or(block.until, |left| block.until.min(self.context.clock.wall() + left));
            first = Some(first.map_or(due, |first: SystemTime| first.min(due)));
            if shown.is_none() {
                self.show_back_off(&pass.pod, state, start);
            }
        }
        (actions, first)
    }

    /// Shows a blocked start as waiting, and sends the event of that.
    fn show_back_off(&mut self, pod: &Pod, state: &mut SyncState, start: &StartContainer) {
        let Some(error) = PodError::crash_loop_back_off(pod, start) else { return };
        let failure = StartFailure::from(&error);
        let known = self.status.reasons.insert(start.name.clone(), failure.clone());
        // The runtime's own finish time moves the end of the back-off a little; the message is the same.
        let new = known.is_none_or(|known| known.message != failure.message);
        if state.event_is_due(&start.name, new)
            && let Some(event) = error.event()
        {
            let recorder = &self.context.recorder;
            recorder.pod_event(pod, &field_path(start), event.kind, &event.reason, &event.message);
        }
    }

    /// The next pass over a pod with a start blocked until `until`; at least one per sync period repeats the event.
    fn recheck_at(&self, until: SystemTime) -> Instant {
        let period = self.context.sync_frequency.mul_f64(1.0 + fastrand::f64() * 0.5);
        self.at(until).min(Instant::now() + period)
    }

    /// Forgets why containers were not started that run.
    fn forget_reasons_of_running(&mut self, snapshot: &PodSnapshot) {
        let newest = snapshot.newest_by_name();
        let is_running = |name: &str| newest.get(name).is_some_and(|of| of.state == ContainerState::Running);
        self.status.reasons.retain(|name, _| !is_running(name));
    }

    /// Keeps why containers were not started. Returns those that were.
    fn remember(&mut self, outcome: &SyncOutcome) -> Vec<ContainerId> {
        let mut started = Vec::new();
        for start in &outcome.starts {
            match &start.result {
                Ok(id) => {
                    started.push(id.clone());
                    self.status.reasons.remove(&start.name)
                }
                Err(failure) => self.status.reasons.insert(start.name.clone(), failure.clone()),
            };
        }
        started
    }
}

/// Everything that failed, as one text.
fn failures(outcome: &SyncOutcome) -> String {
    let starts = outcome.starts.iter().filter_map(|start| start.result.as_ref().err()).map(ToString::to_string);
    outcome.errors.iter().map(ToString::to_string).chain(starts).collect::<Vec<_>>().join(", ")
}

fn field_path(start: &StartContainer) -> String {
    let list = match start.class {
        ContainerClass::Regular => "containers",
        ContainerClass::Init | ContainerClass::Sidecar => "initContainers",
        ContainerClass::Ephemeral => "ephemeralContainers",
    };
    format!("spec.{list}{{{}}}", start.name)
}
