//! Pod conditions. The status cache fills in transition times.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;

use super::StatusInput;
use super::containers::statuses_by_name;
use super::state;
use crate::model::SandboxNeed;
use crate::model::restart;
use crate::model::spec;
use crate::model::spec::SpecContainer;

pub(super) const ALL_CONTAINERS_RESTARTING: &str = "AllContainersRestarting";
pub(super) const CONTAINERS_READY: &str = "ContainersReady";
pub(super) const DISRUPTION_TARGET: &str = "DisruptionTarget";
const INITIALIZED: &str = "Initialized";
const POD_SCHEDULED: &str = "PodScheduled";
pub(super) const READY: &str = "Ready";
const READY_TO_START: &str = "PodReadyToStartContainers";
const SANDBOX_NOT_READY: &str = "PodSandboxNotReady";
/// Reason of the condition `DisruptionTarget` of a pod that a kubelet terminates.
pub(super) const TERMINATION_BY_KUBELET: &str = "TerminationByKubelet";

/// Conditions of resizes, which come with their times.
const RESIZES: [&str; 2] = ["PodResizePending", "PodResizeInProgress"];

/// Conditions only the agent writes.
const OWNED: [&str; 8] = [
    POD_SCHEDULED,
    READY_TO_START,
    INITIALIZED,
    READY,
    CONTAINERS_READY,
    RESIZES[0],
    RESIZES[1],
    ALL_CONTAINERS_RESTARTING,
];

/// Conditions that readiness gates cannot name: upstream determines Ready before them.
const NO_GATES: [&str; 4] = [READY, CONTAINERS_READY, POD_SCHEDULED, ALL_CONTAINERS_RESTARTING];

/// True for conditions only the agent writes.
pub(super) fn is_owned(type_: &str) -> bool {
    OWNED.contains(&type_)
}

/// True for conditions whose times are set where they are made.
pub(super) fn is_timed(type_: &str) -> bool {
    RESIZES.contains(&type_)
}

/// True for the condition that the agent disrupts the pod. Others write conditions of that type too, and the disruption
/// controller takes theirs back from pods that were not deleted: a copy of them may be outdated.
pub(super) fn is_own_disruption(condition: &PodCondition) -> bool {
    condition.type_ == DISRUPTION_TARGET && condition.reason.as_deref() == Some(TERMINATION_BY_KUBELET)
}

/// True for conditions the agent writes, alone or with others.
pub(super) fn is_written_by_agent(type_: &str) -> bool {
    is_owned(type_) || type_ == DISRUPTION_TARGET
}

/// All conditions of a pod with this phase and these container statuses.
pub(super) fn all(input: &StatusInput<'_>, status: &PodStatus) -> Vec<PodCondition> {
    let api = input.api().and_then(|api| api.conditions.as_deref()).unwrap_or_default();
    let disrupted = input.old.conditions.iter().flatten().find(|c| is_own_disruption(c));
    let replaced = |type_: &str| OWNED.contains(&type_) || (disrupted.is_some() && type_ == DISRUPTION_TARGET);
    let foreign = |c: &&PodCondition| !replaced(&c.type_);
    let resizes = if input.is_terminal { &[] } else { input.resize.conditions };
    let mut conditions: Vec<PodCondition> =
        api.iter().filter(foreign).chain(resizes).chain(disrupted).cloned().collect();
    let generation = input.pod.metadata.generation;
    conditions.push(ready_to_start_containers(input).condition(READY_TO_START, generation));
    conditions.push(initialized(input, status).condition(INITIALIZED, generation));
    let (containers_ready, ready) = readiness(input.pod, status, &conditions);
    let values = [(READY, ready), (CONTAINERS_READY, containers_ready), (POD_SCHEDULED, ConditionValue::yes())];
    conditions.extend(values.into_iter().map(|(type_, value)| value.condition(type_, generation)));
    conditions.extend(restarting_all(input, status).map(|value| value.condition(ALL_CONTAINERS_RESTARTING, None)));
    conditions
}

/// Sets the conditions that depend on the readiness of containers. The status cache fills in transition times.
pub(super) fn update_readiness(pod: &Pod, status: &mut PodStatus) {
    let mut conditions = status.conditions.take().unwrap_or_default();
    let gates = conditions.iter().filter(|c| !NO_GATES.contains(&c.type_.as_str())).cloned().collect::<Vec<_>>();
    let (containers_ready, ready) = readiness(pod, status, &gates);
    for (type_, value) in [(READY, ready), (CONTAINERS_READY, containers_ready)] {
        if let Some(condition) = conditions.iter_mut().find(|c| c.type_ == type_) {
            *condition = value.condition(type_, pod.metadata.generation);
        }
    }
    status.conditions = Some(conditions);
}

/// ContainersReady and Ready; `known` are the conditions that gates can name.
fn readiness(pod: &Pod, status: &PodStatus, known: &[PodCondition]) -> (ConditionValue, ConditionValue) {
    let containers_ready = containers_ready(pod, status);
    let ready = if containers_ready.is_true { readiness_gates(pod, known) } else { containers_ready.clone() };
    (containers_ready, ready)
}

/// Status, reason and message of a condition.
#[derive(Clone, Debug)]
struct ConditionValue {
    is_true: bool,
    reason: &'static str,
    message: String,
}

impl ConditionValue {
    fn yes() -> Self {
        Self { is_true: true, reason: "", message: String::new() }
    }

    fn no(reason: &'static str, message: String) -> Self {
        Self { is_true: false, reason, message }
    }

    /// True if there are no `problems`, else False with them as message.
    fn true_unless(problems: &[String], reason: &'static str) -> Self {
        if problems.is_empty() { Self::yes() } else { Self::no(reason, problems.join(", ")) }
    }

    fn condition(self, type_: &str, observed_generation: Option<i64>) -> PodCondition {
        PodCondition {
            type_: type_.to_owned(),
            status: if self.is_true { "True" } else { "False" }.to_owned(),
            reason: (!self.reason.is_empty()).then(|| self.reason.to_owned()),
            message: (!self.message.is_empty()).then_some(self.message),
            observed_generation,
            ..PodCondition::default()
        }
    }
}

fn ready_to_start_containers(input: &StatusInput<'_>) -> ConditionValue {
    match SandboxNeed::of(input.pod, input.snapshot) {
        SandboxNeed::Keep(_) => ConditionValue::yes(),
        SandboxNeed::Create { defect, .. } => ConditionValue::no(SANDBOX_NOT_READY, defect.message().to_owned()),
    }
}

fn initialized(input: &StatusInput<'_>, status: &PodStatus) -> ConditionValue {
    let entries: Vec<_> = spec::classified_init(input.pod).collect();
    let statuses = status.init_container_statuses.as_deref();
    if statuses.is_none() && !entries.is_empty() {
        return ConditionValue::no("UnknownContainerStatuses", String::new());
    }
    let is_done = |entry: &SpecContainer<'_>, status: &ContainerStatus| {
        if spec::is_sidecar(entry.spec) { status.started == Some(true) } else { status.ready }
    };
    let (unknown, incomplete) = unknown_and_unsatisfied(&entries, statuses.unwrap_or_default(), is_done);
    if status.phase.as_deref() == Some("Succeeded") && unknown.is_empty() {
        return ConditionValue { reason: "PodCompleted", ..ConditionValue::yes() };
    }
    let has_started = |status: &ContainerStatus| {
        let state = status.state.as_ref();
        state.is_some_and(|state| state.running.is_some()) || state::terminated(state).is_some()
    };
    let initialized_before =
        input.old.conditions.iter().flatten().any(|c| c.type_ == INITIALIZED && c.status == "True");
    if status.container_statuses.iter().flatten().any(has_started) || (input.gates.all_containers && initialized_before)
    {
        return ConditionValue::yes();
    }
    ConditionValue::true_unless(&problems(&unknown, &incomplete, "incomplete"), "ContainersNotInitialized")
}

fn containers_ready(pod: &Pod, status: &PodStatus) -> ConditionValue {
    let Some(regular) = status.container_statuses.as_deref() else {
        return ConditionValue::no("UnknownContainerStatuses", String::new());
    };
    let statuses = [status.init_container_statuses.as_deref().unwrap_or_default(), regular].concat();
    let sidecars = spec::classified_init(pod).filter(|entry| spec::is_sidecar(entry.spec));
    let entries: Vec<_> = sidecars.chain(spec::classified_regular(pod)).collect();
    let (unknown, unready) = unknown_and_unsatisfied(&entries, &statuses, |_, status| status.ready);
    match status.phase.as_deref() {
        Some("Succeeded") if unknown.is_empty() => ConditionValue::no("PodCompleted", String::new()),
        Some("Failed") => ConditionValue::no("PodFailed", String::new()),
        _ => ConditionValue::true_unless(&problems(&unknown, &unready, "unready"), "ContainersNotReady"),
    }
}

/// Names of containers without a status, and of those whose status fails the test.
fn unknown_and_unsatisfied<'a>(
    entries: &[SpecContainer<'a>],
    statuses: &[ContainerStatus],
    satisfies: impl Fn(&SpecContainer<'a>, &ContainerStatus) -> bool,
) -> (Vec<&'a str>, Vec<&'a str>) {
    let (mut unknown, mut unsatisfied) = (Vec::new(), Vec::new());
    let statuses = statuses_by_name(statuses);
    for entry in entries {
        match statuses.get(entry.name()) {
            None => unknown.push(entry.name()),
            Some(status) if !satisfies(entry, status) => unsatisfied.push(entry.name()),
            Some(_) => {}
        }
    }
    (unknown, unsatisfied)
}

fn problems(unknown: &[&str], unsatisfied: &[&str], what: &str) -> Vec<String> {
    let describe = |names: &[&str], what: &str| {
        (!names.is_empty()).then(|| format!("containers with {what} status: [{}]", names.join(" ")))
    };
    [describe(unknown, "unknown"), describe(unsatisfied, what)].into_iter().flatten().collect()
}

/// `spec.readinessGates` (KEP-580).
fn readiness_gates(pod: &Pod, known: &[PodCondition]) -> ConditionValue {
    let gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    let problems: Vec<String> = gates
        .filter_map(|gate| {
            let name = &gate.condition_type;
            match known.iter().find(|c| &c.type_ == name) {
                None => Some(format!(r#"corresponding condition of pod readiness gate "{name}" does not exist."#)),
                Some(c) if c.status != "True" => {
                    Some(format!(r#"the status of pod readiness gate "{name}" is not "True", but {}"#, c.status))
                }
                Some(_) => None,
            }
        })
        .collect();
    ConditionValue::true_unless(&problems, "ReadinessGatesNotReady")
}

/// Only for pods with a restart rule of action `RestartAllContainers` (KEP-5532).
fn restarting_all(input: &StatusInput<'_>, status: &PodStatus) -> Option<ConditionValue> {
    let has_rule = spec::lasting_containers(input.pod).any(|c| restart::may_restart_all(c.spec, input.gates));
    let announced = input.announced_restart_all();
    let pending = restart::restart_all_pending(input.pod, input.snapshot, announced, input.gates);
    has_rule.then(|| match status.phase.as_deref() {
        Some("Succeeded") => ConditionValue::no("PodCompleted", String::new()),
        Some("Failed") => ConditionValue::no("PodFailed", String::new()),
        _ if pending => ConditionValue {
            is_true: true,
            reason: "RestartAllContainersStarted",
            message: "container exited with restart policy rule".to_owned(),
        },
        _ => ConditionValue::no("", String::new()),
    })
}
