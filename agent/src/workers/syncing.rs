//! A worker's syncing phase (`SyncPod`): inspect, plan, execute, and again, until the plan is empty.

use std::collections::HashMap;
use std::collections::HashSet;
use std::time::Duration;
use std::time::SystemTime;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::act;
use super::act::PassContext;
use super::act::PodError;
use super::act::SyncOutcome;
use super::active_deadline::ActiveDeadline;
use super::backoff;
use super::plan::PlanInput;
use super::plan::plan;
use super::publish::Transition;
use super::volume_refresh::VolumeRefresh;
use super::volume_refresh::earliest;
use super::worker::Next;
use super::worker::Worker;
use crate::model::ContainerClass;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::Pod;
use crate::model::PodActions;
use crate::model::PodSnapshot;
use crate::model::SandboxPlan;
use crate::model::SandboxStatus;
use crate::model::StartContainer;
use crate::model::StartFailure;
use crate::model::spec;
use crate::recorder::EventType;
use crate::retry::Operation;

/// State of the syncing phase between passes.
#[derive(Default)]
pub(super) struct SyncState {
    /// When the event of a container's crash-loop back-off was last sent, by name.
    event_sent: HashMap<String, Instant>,
    /// Since when back-off holds a container, by name, by a clock that is not set; until its next start.
    held: HashMap<String, Instant>,
    /// The last start of each container if it failed, by name.
    failed: HashMap<String, FailedStart>,
    /// When all containers were last removed to be restarted.
    restarted_all: Option<Instant>,
    /// When the plan that has last created a sandbox was executed.
    sandbox_created: Option<Instant>,
    /// Refresh state of the pod's volumes.
    pub volumes: VolumeRefresh,
    /// The end of the pod's `activeDeadlineSeconds`.
    pub deadline: ActiveDeadline,
}

/// A start that failed.
struct FailedStart {
    at: Instant,
    /// The instance that had exited last by then.
    exited: Option<ContainerId>,
}

impl SyncState {
    /// Keeps which starts failed, of a plan that was made from this snapshot.
    fn remember_starts(&mut self, snapshot: &PodSnapshot, outcome: &SyncOutcome) {
        let last_exited = last_exited(snapshot);
        for tried in &outcome.starts {
            self.held.remove(&tried.name);
            if tried.result.is_ok() {
                self.failed.remove(&tried.name);
            } else {
                let exited = last_exited.get(tried.name.as_str()).copied().cloned();
                self.failed.insert(tried.name.clone(), FailedStart { at: Instant::now(), exited });
            }
        }
    }

    /// For how long the status still shows why the last start of a container failed, instead of the back-off that holds the
    /// next one; `None` if it need not, or if an instance has exited since.
    fn failure_shown_for(&self, last_exited: &LastExited<'_>, name: &str) -> Option<Duration> {
        let failed = self.failed.get(name)?;
        let left = FAILURE_SHOWN.saturating_sub(failed.at.elapsed());
        (!left.is_zero() && failed.exited.as_ref() == last_exited.get(name).copied()).then_some(left)
    }

    /// When the restart of all containers that is planned is due, if it is too early now.
    fn restart_all_due(&self, actions: &PodActions) -> Option<Instant> {
        let due = self.restarted_all? + RESTART_ALL_PERIOD;
        (!actions.remove.is_empty() && due > Instant::now()).then_some(due)
    }

    /// When the creation of a sandbox that is planned is due, if it is too early now.
    fn sandbox_due(&self, actions: &PodActions) -> Option<Instant> {
        let due = self.sandbox_created? + SANDBOX_PERIOD;
        let creates = matches!(actions.sandbox, SandboxPlan::Create { .. });
        (creates && due > Instant::now()).then_some(due)
    }
}

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
            self.runtime_ready().await;
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
        state.remember_starts(&pass.snapshot, &outcome);
        let started = self.remember(&outcome);
        self.remember_resize(pass, &outcome);
        let resized = actions.resize.iter().flat_map(|resize| resize.memory.iter().chain(&resize.cpu));
        self.acted_on(started, resized.map(|container| container.id.clone()).collect());
        self.context.observer.acted(began.elapsed(), &outcome);
        if outcome.restart_all_done {
            state.restarted_all = Some(Instant::now());
        }
        if outcome.sandbox == Some(true) {
            state.sandbox_created = Some(Instant::now());
        }
        if outcome.is_ok() {
            return None;
        }
        if let Ok(after) = self.view().await {
            self.publish(&pass.with_snapshot(after), Transition::Inspected);
        }
        let reason = failures(&outcome);
        // Container exits and requests wake the worker; this is for what just failed.
        let operation = if outcome.network_not_ready() { Operation::AwaitNetwork } else { Operation::SyncPod };
        let first = [blocked, outcome.retry_at()].into_iter().flatten().min();
        if let Some(until) = first.filter(|_| outcome.is_held_back()) {
            return Some(Next::Retry(self.recheck_at(until)));
        }
        match first {
            None if outcome.volumes_not_ready() => {
                tracing::debug!(pod = %self.pod_ref, reason, "volumes are not ready");
                Some(Next::Wait(Some(state.volumes.failed(outcome.claims_not_ready()))))
            }
            None => Some(self.retry(operation, &reason)),
            Some(until) => {
                let due = self.recheck_at(until);
                match self.retry(operation, &reason) {
                    Next::Retry(retry) => Some(Next::Retry(retry.min(due))),
                    next => Some(next),
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

    /// Ends back-offs that have lasted long enough. The end in the plan is a time of the wall clock, counted from that of an
    /// exit: a clock that was set back since reaches it late.
    fn bound_back_offs(&self, held: &mut HashMap<String, Instant>, actions: &mut PodActions) {
        let (now, wall) = (Instant::now(), self.context.clock.wall());
        for start in &mut actions.start {
            let Some(block) = &mut start.blocked else { continue };
            let since = *held.entry(start.name.clone()).or_insert(now);
            let left = block.backoff.saturating_sub(now.saturating_duration_since(since));
            block.until = block.until.min(wall + left);
            if left.is_zero() {
                start.blocked = None;
            }
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
        self.bound_back_offs(&mut state.held, &mut actions);
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
        let sent = state.event_sent.get(&start.name);
        if new || sent.is_none_or(|sent| sent.elapsed() >= BACK_OFF_EVENT_PERIOD) {
            state.event_sent.insert(start.name.clone(), Instant::now());
            if let Some(event) = error.event() {
                let recorder = &self.context.recorder;
                recorder.pod_event(pod, &field_path(start), event.kind, &event.reason, &event.message);
            }
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

/// Containers that exit at once would otherwise be restarted several times a second, each time with new files: no back-off
/// applies (KEP-5532). Upstream sees an exit with its next relist, once a second.
const RESTART_ALL_PERIOD: Duration = Duration::from_secs(1);

/// A sandbox that ends at once, or is reported without an address, would otherwise be replaced as fast as the runtime makes
/// another one: no back-off applies. Upstream sees its end with its next relist, once a second.
const SANDBOX_PERIOD: Duration = Duration::from_secs(1);

/// The cause of a failed start is shown at least for so long: a kubelet syncs the pod again after that.
const FAILURE_SHOWN: Duration = Duration::from_secs(10);

/// The event of a blocked start is repeated after this at the earliest.
const BACK_OFF_EVENT_PERIOD: Duration = Duration::from_secs(1);

/// The instance of each container that has exited last, by name.
type LastExited<'a> = HashMap<&'a str, &'a ContainerId>;

fn last_exited(snapshot: &PodSnapshot) -> LastExited<'_> {
    let exited = snapshot.containers.iter().rev().filter(|instance| instance.state == ContainerState::Exited);
    exited.map(|instance| (instance.name.as_str(), &instance.id)).collect()
}

fn field_path(start: &StartContainer) -> String {
    let list = match start.class {
        ContainerClass::Regular => "containers",
        ContainerClass::Init | ContainerClass::Sidecar => "initContainers",
        ContainerClass::Ephemeral => "ephemeralContainers",
    };
    format!("spec.{list}{{{}}}", start.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::StartOutcome;
    use crate::model::testing::exited;
    use crate::model::testing::snapshot;

    fn tried(result: Result<ContainerId, StartFailure>) -> SyncOutcome {
        let start = StartOutcome { name: "c".to_owned(), class: ContainerClass::Regular, result };
        SyncOutcome { starts: vec![start], ..SyncOutcome::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn the_cause_of_a_failed_start_is_shown_until_another_start_or_exit() {
        let refused = || {
            let (token, message) = ("CreateContainerError".to_owned(), "refused".to_owned());
            tried(Err(StartFailure { token, message, retry_at: None }))
        };
        let crashed = snapshot(vec![exited("c", 0, 1)]);
        let mut state = SyncState::default();
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "c"), None, "no start has failed");
        state.remember_starts(&crashed, &refused());
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "c"), Some(FAILURE_SHOWN));
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "other"), None);
        let again = snapshot(vec![exited("c", 1, 1), exited("c", 0, 1)]);
        assert_eq!(state.failure_shown_for(&last_exited(&again), "c"), None, "it has exited once more");
        tokio::time::advance(FAILURE_SHOWN).await;
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "c"), None, "it was shown for long enough");
        state.remember_starts(&crashed, &refused());
        state.remember_starts(&crashed, &tried(Ok("c-1".into())));
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "c"), None, "it was started");
    }

    /// Containers: as many as an object of the API server has room for.
    #[tokio::test(start_paused = true)]
    async fn thousands_of_failed_starts_are_kept() {
        let names: Vec<String> = (0..20_000).map(|number| format!("c{number}")).collect();
        let crashed = |attempt| snapshot(names.iter().map(|name| exited(name, attempt, 1)).collect());
        let (token, message) = ("CreateContainerError".to_owned(), "refused".to_owned());
        let refused = StartFailure { token, message, retry_at: None };
        let start = |name: &String| StartOutcome {
            name: name.clone(),
            class: ContainerClass::Regular,
            result: Err(refused.clone()),
        };
        let outcome = SyncOutcome { starts: names.iter().map(start).collect(), ..SyncOutcome::default() };
        let (before, mut state) = (crashed(0), SyncState::default());
        state.remember_starts(&before, &outcome);
        let again = crashed(1);
        for (view, shown) in [(before, Some(FAILURE_SHOWN)), (again, None)] {
            let exited = last_exited(&view);
            assert!(names.iter().all(|name| state.failure_shown_for(&exited, name) == shown), "{shown:?}");
        }
    }
}
