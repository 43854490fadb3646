//! The phase of a pod, counted from its container statuses. Ephemeral containers do not count.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerStateTerminated;
use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;

use crate::model::ContainerState;
use crate::model::PodSnapshot;
use crate::model::restart;
use crate::model::restart::RestartGates;
use crate::model::spec;

use super::StatusInput;
use super::containers::RESTARTING_ALL;

/// True for `Succeeded` and `Failed`.
pub(super) fn is_terminal(phase: &str) -> bool {
    phase == "Succeeded" || phase == "Failed"
}

/// The phase these container statuses amount to.
pub(super) fn of(input: &StatusInput<'_>, status: &PodStatus) -> &'static str {
    let mut count = Count::default();
    let judge = Judge { pod: input.pod, gates: input.gates };
    for container in spec::init_containers(input.pod) {
        let own = find(status.init_container_statuses.as_deref(), &container.name);
        if spec::is_sidecar(container) { count.sidecar(own) } else { count.init(&judge, container, own) }
    }
    for container in spec::regular_containers(input.pod) {
        count.regular(&judge, container, find(status.container_statuses.as_deref(), &container.name));
    }
    let ends_here = input.is_terminal && !spec::is_static(input.pod);
    count.phase(any_regular_created(input.pod, input.snapshot), ends_here)
}

/// Whether a regular container was ever created in the sandbox in use.
fn any_regular_created(pod: &Pod, snapshot: &PodSnapshot) -> bool {
    let regular = |name: &str| spec::regular_containers(pod).iter().any(|container| container.name == name);
    let made = |state| matches!(state, ContainerState::Created | ContainerState::Running | ContainerState::Exited);
    snapshot.active().any(|instance| made(instance.state) && regular(&instance.name))
}

fn find<'a>(statuses: Option<&'a [ContainerStatus]>, name: &str) -> Option<&'a ContainerStatus> {
    statuses.unwrap_or_default().iter().find(|status| status.name == name)
}

/// What a container status says, in the order the API reads it.
enum Seen<'a> {
    Nothing,
    Running,
    Terminated(&'a ContainerStateTerminated),
    WaitingAfter(&'a ContainerStateTerminated),
    Waiting,
}

impl<'a> Seen<'a> {
    fn of(status: Option<&'a ContainerStatus>) -> Self {
        let Some((status, state)) = status.and_then(|status| Some((status, status.state.as_ref()?))) else {
            return Self::Nothing;
        };
        let last = status.last_state.as_ref().and_then(|last| last.terminated.as_ref());
        match (&state.running, &state.terminated, &state.waiting, last) {
            (Some(_), ..) => Self::Running,
            (_, Some(terminated), ..) => Self::Terminated(terminated),
            (_, _, Some(_), Some(last)) => Self::WaitingAfter(last),
            (_, _, Some(_), None) => Self::Waiting,
            _ => Self::Nothing,
        }
    }
}

struct Judge<'a> {
    pod: &'a Pod,
    gates: RestartGates,
}

impl Judge<'_> {
    fn restarts(&self, container: &Container, end: &ContainerStateTerminated) -> bool {
        end.reason.as_deref() == Some(RESTARTING_ALL)
            || restart::restarts_after(self.pod, container, end.exit_code, self.gates)
    }
}

#[derive(Default)]
struct Count {
    pending_init: usize,
    failed_init_for_good: usize,
    pending_sidecars: usize,
    unknown: usize,
    running: usize,
    waiting: usize,
    stopped: usize,
    stopped_for_good: usize,
    succeeded: usize,
}

impl Count {
    fn init(&mut self, judge: &Judge<'_>, container: &Container, status: Option<&ContainerStatus>) {
        match Seen::of(status) {
            Seen::Nothing | Seen::Running | Seen::Waiting => self.pending_init += 1,
            Seen::Terminated(end) | Seen::WaitingAfter(end) if end.exit_code != 0 => {
                self.failed_init_for_good += usize::from(!judge.restarts(container, end));
            }
            Seen::Terminated(_) | Seen::WaitingAfter(_) => {}
        }
    }

    fn sidecar(&mut self, status: Option<&ContainerStatus>) {
        match Seen::of(status) {
            Seen::Running => {
                self.running += 1;
                self.pending_sidecars += usize::from(status.and_then(|s| s.started) != Some(true));
            }
            Seen::Terminated(_) | Seen::WaitingAfter(_) => {}
            Seen::Waiting => {
                self.pending_sidecars += 1;
                self.waiting += 1;
            }
            Seen::Nothing => {
                self.pending_sidecars += usize::from(status.is_some());
                self.unknown += 1;
            }
        }
    }

    fn regular(&mut self, judge: &Judge<'_>, container: &Container, status: Option<&ContainerStatus>) {
        match Seen::of(status) {
            Seen::Nothing => self.unknown += 1,
            Seen::Running => self.running += 1,
            Seen::Waiting => self.waiting += 1,
            Seen::Terminated(end) => {
                self.stop(judge.restarts(container, end));
                self.succeeded += usize::from(end.exit_code == 0);
            }
            Seen::WaitingAfter(end) => self.stop(judge.restarts(container, end)),
        }
    }

    fn stop(&mut self, restarts: bool) {
        self.stopped += 1;
        self.stopped_for_good += usize::from(!restarts);
    }

    fn phase(&self, any_regular_created: bool, ends_here: bool) -> &'static str {
        let verdict = if self.stopped == self.succeeded { "Succeeded" } else { "Failed" };
        let waits = self.pending_init > 0 || self.waiting > 0;
        if self.failed_init_for_good > 0 {
            "Failed"
        } else if waits || (self.pending_sidecars > 0 && !any_regular_created) || self.unknown > 0 {
            "Pending"
        } else if self.running > 0 {
            "Running"
        } else if self.stopped == 0 {
            "Pending"
        } else if ends_here {
            verdict
        } else if self.stopped > self.stopped_for_good {
            "Running"
        } else {
            verdict
        }
    }
}
