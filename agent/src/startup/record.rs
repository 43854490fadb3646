//! The start of one pod. Pure; times are arguments.

use std::collections::HashMap;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::jiff::Timestamp;

use super::Start;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::spec;

/// Times of a pod that is not measured yet.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// Ordered by their beginning.
    pulls: Vec<(SystemTime, SystemTime)>,
    /// Set when a running status was published: the duration of init containers.
    running: Option<Duration>,
    measured: bool,
    /// Only the first view shows whether an earlier agent has started the pod.
    awaits_view: bool,
}

impl Record {
    pub(super) fn of_static_pod() -> Self {
        Self { awaits_view: true, ..Self::default() }
    }

    pub(super) fn pulled(&mut self, began: SystemTime, ended: SystemTime) {
        if self.running.is_none() {
            let at = self.pulls.partition_point(|(earlier, _)| *earlier <= began);
            self.pulls.insert(at, (began, ended));
        }
    }

    /// Returns, the first time that all containers run, the time since the agent first saw the pod, unless an earlier agent
    /// has started it.
    pub(super) fn published(&mut self, pod: &Pod, view: &PodSnapshot, now: SystemTime) -> Option<Duration> {
        if std::mem::take(&mut self.awaits_view) && !view.containers.is_empty() {
            self.running = Some(Duration::ZERO);
        }
        if self.running.is_some() {
            return None;
        }
        let newest = view.newest_by_name();
        let runs = |name: &str| {
            let found = newest.get(name);
            found.is_some_and(|c| c.state == ContainerState::Running && c.started_at > 0 && c.proven.is_none())
        };
        if spec::regular_containers(pod).iter().all(|container| runs(&container.name)) {
            self.running = Some(init_time(pod, &newest));
            return now.duration_since(first_seen(pod)?).ok();
        }
        None
    }

    pub(super) fn observed(&mut self, pod: &Pod, now: SystemTime) -> Option<Start> {
        let init = self.running.filter(|_| !self.measured && pod.status.as_ref().is_some_and(says_running))?;
        let created = pod.metadata.creation_timestamp.as_ref()?.0;
        self.measured = true;
        let total = now.duration_since(SystemTime::from(created)).unwrap_or_default();
        let own = total.saturating_sub(pull_time(&self.pulls)).saturating_sub(init);
        let level = (!has_state(pod)).then_some(own);
        Some(Start { total, level, has_network: !spec::host_network(pod) })
    }
}

/// When the agent first saw the pod, as its source noted it.
pub fn first_seen(pod: &Pod) -> Option<SystemTime> {
    let seen = pod.metadata.annotations.as_ref()?.get("kubernetes.io/config.seen")?;
    seen.parse::<Timestamp>().ok().map(SystemTime::from)
}

/// Whether the phase of the pod is terminal.
pub(super) fn is_over(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Failed" | "Succeeded"))
}

/// Whether no node agent has started it.
pub(super) fn is_new(pod: &Pod) -> bool {
    pod.status.as_ref().is_none_or(|status| status.start_time.is_none())
}

/// Whether the scheduler could not place the pod at once.
pub(super) fn waits_for_scheduling(pod: &Pod) -> bool {
    let conditions = pod.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
    conditions.into_iter().any(|condition| condition.type_ == "PodScheduled" && condition.status == "False")
}

fn says_running(status: &PodStatus) -> bool {
    let containers = status.container_statuses.iter().flatten();
    containers
        .map(|container| container.state.as_ref().and_then(|state| state.running.as_ref()))
        .all(|running| running.is_some_and(|running| running.started_at.is_some()))
}

/// Duration of completed init containers; sidecars do not delay others.
fn init_time(pod: &Pod, newest: &HashMap<&str, &ContainerStatus>) -> Duration {
    let ends = spec::init_containers(pod).iter().filter(|container| !spec::is_sidecar(container));
    let took = ends.filter_map(|container| newest.get(container.name.as_str())).filter(|status| status.finished_at > 0);
    let nanos = took.map(|status| status.finished_at.saturating_sub(status.started_at));
    Duration::from_nanos(nanos.filter_map(|nanos| u64::try_from(nanos).ok()).sum())
}

/// Time in which at least one pull was in progress; `pulls` are ordered by their beginning.
fn pull_time(pulls: &[(SystemTime, SystemTime)]) -> Duration {
    let mut total = Duration::ZERO;
    let mut until = SystemTime::UNIX_EPOCH;
    for (began, ended) in pulls {
        total += ended.duration_since(until.max(*began)).unwrap_or_default();
        until = until.max(*ended);
    }
    total
}

/// Whether the pod has volumes other than those that API server or node provide, which are not part of the SLI.
fn has_state(pod: &Pod) -> bool {
    let volumes = pod.spec.iter().filter_map(|spec| spec.volumes.as_ref()).flatten();
    let plain = |volume: &Volume| {
        volume.secret.is_some()
            || volume.config_map.is_some()
            || volume.downward_api.is_some()
            || volume.empty_dir.is_some()
            || volume.projected.is_some()
    };
    !volumes.into_iter().all(plain)
}
