//! The status of one pod, in the order its parts depend on each other (upstream: `generateAPIPodStatus`).

use std::collections::HashMap;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::api::core::v1::ResourceRequirements;

use super::addresses;
use super::conditions;
use super::containers;
use super::phase;
use super::readiness;
use super::rejection;
use super::time;
use crate::model::PodSnapshot;
use crate::model::ProbeResults;
use crate::model::StartFailure;
use crate::model::resources::PodResources;
use crate::model::restart::RestartGates;

/// The node's own addresses, primary one first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAddresses {
    /// At most one per family.
    pub ips: Vec<String>,
    /// `--node-ip` begins with an IPv6 address: the IPv6 address of a pod comes first. Known from the start, unlike `ips`.
    pub prefers_v6: bool,
}

/// How far resizes of a pod are.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResizeView<'a> {
    /// Their conditions, in order.
    pub conditions: &'a [PodCondition],
    /// What was applied, as far as known.
    pub actuated: Option<&'a PodResources>,
    /// Not everything that is allocated is applied.
    pub is_resizing: bool,
}

/// Input of the status computation.
#[derive(Clone, Copy, Debug)]
pub struct StatusInput<'a> {
    /// The pod as its source has it, its API status included.
    pub pod: &'a Pod,
    /// The runtime's snapshot of the pod.
    pub snapshot: &'a PodSnapshot,
    /// The previous status: the cached one, else the pod's own.
    pub old: &'a PodStatus,
    /// Last start failure of each container that was not started since, by container name (upstream: reason cache).
    pub reasons: &'a HashMap<String, StartFailure>,
    /// Results of the pod's probes.
    pub probes: Option<&'a ProbeResults>,
    /// `status.qosClass` computed from the spec; a value set by the API server is kept.
    pub qos_class: &'a str,
    /// Requests and limits of the whole pod, if its quantities can be read and its status is to have them (KEP-5419).
    pub resources: Option<&'a ResourceRequirements>,
    /// Resizes of the pod (KEP-1287).
    pub resize: ResizeView<'a>,
    /// The pod's runtime handler supports recursive read-only mounts (KEP-3857).
    pub recursive_read_only: bool,
    /// The signals that stop containers are reported (KEP-4960).
    pub stop_signals: bool,
    /// The pod's containers are stopped and will not be restarted.
    pub is_terminal: bool,
    /// The runtime's type, the part of container ids before `://`.
    pub runtime_type: &'a str,
    /// Addresses of the node, none while unknown.
    pub node: &'a NodeAddresses,
    /// Feature gates.
    pub gates: RestartGates,
    /// The wall clock.
    pub now: SystemTime,
}

impl StatusInput<'_> {
    /// The status of the API object.
    pub(super) fn api(&self) -> Option<&PodStatus> {
        self.pod.status.as_ref()
    }

    /// The previous status has condition `AllContainersRestarting` (KEP-5532).
    pub(super) fn announced_restart_all(&self) -> bool {
        let mut conditions = self.old.conditions.iter().flatten();
        conditions.any(|c| c.type_ == conditions::ALL_CONTAINERS_RESTARTING && c.status == "True")
    }
}

/// The status of a pod. The cache adds transition times and the start time.
pub fn generate(input: &StatusInput<'_>) -> PodStatus {
    let mut status = PodStatus {
        init_container_statuses: containers::init(input),
        container_statuses: containers::regular(input),
        ephemeral_container_statuses: containers::ephemeral(input),
        qos_class: Some(qos_class(input)),
        allocated_resources: input.resources.and_then(|resources| resources.requests.clone()),
        resources: pod_resources(input),
        observed_generation: input.pod.metadata.generation,
        ..PodStatus::default()
    };
    set_phase(input, &mut status);
    readiness::set_started_and_ready(input.pod, input.snapshot, input.probes, &mut status);
    status.conditions = Some(conditions::all(input, &status));
    addresses::set(input, &mut status);
    status
}

/// `status.resources`: what is allocated, or the previous one until that is applied.
fn pod_resources(input: &StatusInput<'_>) -> Option<ResourceRequirements> {
    let resources = input.resources?;
    let was_running = input.old.phase.as_deref() == Some("Running");
    let previous = input.old.resources.as_ref().filter(|_| input.resize.is_resizing && was_running);
    Some(previous.unwrap_or(resources).clone())
}

fn qos_class(input: &StatusInput<'_>) -> String {
    let kept = input.api().and_then(|status| status.qos_class.clone());
    kept.unwrap_or_else(|| input.qos_class.to_owned())
}

fn set_phase(input: &StatusInput<'_>, status: &mut PodStatus) {
    let terminal = |status: Option<&PodStatus>| status.and_then(|s| s.phase.clone()).filter(|p| phase::is_terminal(p));
    let computed = phase::of(input, status).to_owned();
    let kept = || terminal(Some(input.old)).or_else(|| terminal(input.api()));
    let is_decided = rejection::is_rejected(input.old) && !has_succeeded(input, status);
    let phase = if phase::is_terminal(&computed) && !is_decided { computed } else { kept().unwrap_or(computed) };
    if input.old.phase.as_deref() == Some(phase.as_str()) {
        let kept = |field: fn(&PodStatus) -> &Option<String>| {
            let former = std::iter::once(input.old).chain(input.api());
            let mut texts = former.filter(|s| !rejection::says_unmanaged(s)).filter_map(|s| field(s).as_ref());
            texts.find(|text| !text.is_empty()).cloned()
        };
        status.reason = kept(|s| &s.reason);
        status.message = kept(|s| &s.message);
    }
    status.phase = Some(phase);
    if deadline_exceeded(input) {
        status.phase = Some("Failed".to_owned());
        status.reason = Some(DEADLINE_EXCEEDED.to_owned());
        status.message = Some(DEADLINE_MESSAGE.to_owned());
    }
    if let Some(phase) = terminal(input.api()) {
        status.phase = Some(phase);
    }
}

/// All containers of the pod have succeeded, and none would be restarted.
fn has_succeeded(input: &StatusInput<'_>, status: &PodStatus) -> bool {
    phase::of(&StatusInput { is_terminal: false, ..*input }, status) == "Succeeded"
}

/// `status.reason` of a pod that ran into `spec.activeDeadlineSeconds`, and the reason of the event of that.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";
/// The message that goes with it.
pub const DEADLINE_MESSAGE: &str = "Pod was active on the node longer than the specified deadline";

/// `spec.activeDeadlineSeconds`, counted from `status.startTime`, has passed. A pod that has ended before keeps how it did:
/// upstream gives it this reason all the same, beside phase Succeeded when the API server has that.
fn deadline_exceeded(input: &StatusInput<'_>) -> bool {
    let ended_otherwise = |status: &PodStatus| {
        let has_ended = status.phase.as_deref().is_some_and(phase::is_terminal);
        has_ended && status.reason.as_deref() != Some(DEADLINE_EXCEEDED)
    };
    if std::iter::once(input.old).chain(input.api()).any(ended_otherwise) {
        return false;
    }
    let limit = input.pod.spec.as_ref().and_then(|spec| spec.active_deadline_seconds);
    let now = time::of_wall(input.now).0.as_second();
    let start = input.old.start_time.as_ref().map(|start| start.0.as_second());
    limit.zip(start).is_some_and(|(limit, start)| start.saturating_add(limit) <= now)
}
