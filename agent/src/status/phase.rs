//! Pod phase, computed from container statuses. Ephemeral containers do not count.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerStateTerminated;
use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;

use super::StatusInput;
use super::containers::RESTARTING_ALL;
use super::containers::statuses_by_name;
use crate::model::ContainerState;
use crate::model::PodSnapshot;
use crate::model::SandboxNeed;
use crate::model::restart;
use crate::model::restart::RestartGates;
use crate::model::spec;

/// True for `Succeeded` and `Failed`.
pub(super) fn is_terminal(phase: &str) -> bool {
    phase == "Succeeded" || phase == "Failed"
}

/// The phase that follows from these container statuses.
pub(super) fn of(input: &StatusInput<'_>, status: &PodStatus) -> &'static str {
    let mut counts = ContainerCounts::default();
    let rules = RestartRules { pod: input.pod, gates: input.gates };
    let of_init = statuses_by_name(status.init_container_statuses.as_deref().unwrap_or_default());
    for container in spec::init_containers(input.pod) {
        let own = of_init.get(container.name.as_str()).copied();
        if spec::is_sidecar(container) { counts.sidecar(own) } else { counts.init(&rules, container, own) }
    }
    let of_regular = statuses_by_name(status.container_statuses.as_deref().unwrap_or_default());
    for container in spec::regular_containers(input.pod) {
        counts.regular(&rules, container, of_regular.get(container.name.as_str()).copied());
    }
    let is_given_up = is_given_up(input);
    let has_ended = is_given_up || (input.is_terminal && !spec::is_static(input.pod));
    match counts.phase(any_regular_created(input.pod, input.snapshot), has_ended) {
        // Not all of its containers have run, and none will.
        phase if is_given_up && !is_terminal(phase) => "Failed",
        phase => phase,
    }
}

/// Nothing of the pod runs, and nothing is started any more, since its sandbox is gone and is not replaced. Upstream leaves
/// a pod with a container that has not run, or that rules would restart, in phase Pending or Running for good.
fn is_given_up(input: &StatusInput<'_>) -> bool {
    let (pod, snapshot) = (input.pod, input.snapshot);
    let SandboxNeed::Create { attempt, .. } = SandboxNeed::of(pod, snapshot) else { return false };
    if restart::may_replace_sandbox(pod, snapshot, attempt) {
        return false;
    }
    let may_go_on = snapshot.containers.iter().any(|instance| match instance.state {
        ContainerState::Running => true,
        // The code may restart all containers.
        ContainerState::Exited => instance.exit_code.is_none(),
        ContainerState::Created | ContainerState::Unknown => false,
    });
    !may_go_on && !restart::restart_all_pending(pod, snapshot, input.announced_restart_all(), input.gates)
}

/// Whether a regular container was ever created in the sandbox in use, whatever is known of its state.
fn any_regular_created(pod: &Pod, snapshot: &PodSnapshot) -> bool {
    let regular: HashSet<&str> =
        spec::regular_containers(pod).iter().map(|container| container.name.as_str()).collect();
    snapshot.active().any(|instance| regular.contains(instance.name.as_str()))
}

/// The state of a container status, in order of precedence.
enum ObservedState<'a> {
    Absent,
    Running,
    Terminated(&'a ContainerStateTerminated),
    WaitingAfter(&'a ContainerStateTerminated),
    Waiting,
}

impl<'a> ObservedState<'a> {
    fn of(status: Option<&'a ContainerStatus>) -> Self {
        let Some((status, state)) = status.and_then(|status| Some((status, status.state.as_ref()?))) else {
            return Self::Absent;
        };
        let last = status.last_state.as_ref().and_then(|last| last.terminated.as_ref());
        match (&state.running, &state.terminated, &state.waiting, last) {
            (Some(_), ..) => Self::Running,
            (_, Some(terminated), ..) => Self::Terminated(terminated),
            (_, _, Some(_), Some(last)) => Self::WaitingAfter(last),
            (_, _, Some(_), None) => Self::Waiting,
            _ => Self::Absent,
        }
    }
}

struct RestartRules<'a> {
    pod: &'a Pod,
    gates: RestartGates,
}

impl RestartRules<'_> {
    fn restarts(&self, container: &Container, terminated: &ContainerStateTerminated) -> bool {
        terminated.reason.as_deref() == Some(RESTARTING_ALL)
            || restart::restarts_after(self.pod, container, terminated.exit_code, self.gates)
    }
}

#[derive(Default)]
struct ContainerCounts {
    pending_init: usize,
    failed_init_permanently: usize,
    pending_sidecars: usize,
    unknown: usize,
    running: usize,
    waiting: usize,
    stopped: usize,
    stopped_permanently: usize,
    succeeded: usize,
}

impl ContainerCounts {
    fn init(&mut self, rules: &RestartRules<'_>, container: &Container, status: Option<&ContainerStatus>) {
        match ObservedState::of(status) {
            ObservedState::Absent | ObservedState::Running | ObservedState::Waiting => self.pending_init += 1,
            ObservedState::Terminated(terminated) | ObservedState::WaitingAfter(terminated)
                if terminated.exit_code != 0 =>
            {
                self.failed_init_permanently += usize::from(!rules.restarts(container, terminated));
            }
            ObservedState::Terminated(_) | ObservedState::WaitingAfter(_) => {}
        }
    }

    fn sidecar(&mut self, status: Option<&ContainerStatus>) {
        match ObservedState::of(status) {
            ObservedState::Running => {
                self.running += 1;
                self.pending_sidecars += usize::from(status.and_then(|s| s.started) != Some(true));
            }
            ObservedState::Terminated(_) | ObservedState::WaitingAfter(_) => {}
            ObservedState::Waiting => {
                self.pending_sidecars += 1;
                self.waiting += 1;
            }
            ObservedState::Absent => {
                self.pending_sidecars += usize::from(status.is_some());
                self.unknown += 1;
            }
        }
    }

    fn regular(&mut self, rules: &RestartRules<'_>, container: &Container, status: Option<&ContainerStatus>) {
        match ObservedState::of(status) {
            ObservedState::Absent => self.unknown += 1,
            ObservedState::Running => self.running += 1,
            ObservedState::Waiting => self.waiting += 1,
            ObservedState::Terminated(terminated) => {
                self.stop(rules.restarts(container, terminated));
                self.succeeded += usize::from(terminated.exit_code == 0);
            }
            ObservedState::WaitingAfter(terminated) => self.stop(rules.restarts(container, terminated)),
        }
    }

    fn stop(&mut self, restarts: bool) {
        self.stopped += 1;
        self.stopped_permanently += usize::from(!restarts);
    }

    fn phase(&self, any_regular_created: bool, is_terminal: bool) -> &'static str {
        let terminal_phase = if self.stopped == self.succeeded { "Succeeded" } else { "Failed" };
        let waits = self.pending_init > 0 || self.waiting > 0;
        if self.failed_init_permanently > 0 {
            "Failed"
        } else if waits || (self.pending_sidecars > 0 && !any_regular_created) || self.unknown > 0 {
            "Pending"
        } else if self.running > 0 {
            "Running"
        } else if self.stopped == 0 {
            "Pending"
        } else if is_terminal {
            terminal_phase
        } else if self.stopped > self.stopped_permanently {
            "Running"
        } else {
            terminal_phase
        }
    }
}
