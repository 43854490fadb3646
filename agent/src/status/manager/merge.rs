//! Merges a pod's own status with that of its API copy. Pure.
//!
//! The agent's status takes precedence, except for fields of other owners: their conditions, resource claims, the nominated
//! node. A transition to a terminal phase is held back while containers of the pod may run.

use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::status::conditions;
use crate::status::phase::is_terminal;

/// Input besides the two statuses.
#[derive(Clone, Copy, Debug)]
pub(super) struct MergeInput<'a> {
    /// Some container of the pod may still run.
    pub may_run: bool,
    /// The copy is the mirror pod of a static pod.
    pub is_mirror: bool,
    /// Transition time of conditions that change by being sent.
    pub now: &'a Time,
}

/// The status that the API copy should have.
pub(super) fn merge(api: &PodStatus, own: &PodStatus, input: MergeInput<'_>) -> PodStatus {
    let is_ended = |status: &PodStatus| status.phase.as_deref().is_some_and(is_terminal);
    let ends = !is_ended(api) && is_ended(own);
    let sends_end = ends && !input.may_run;
    let mut merged = PodStatus {
        conditions: Some(merge_conditions(api, own, sends_end, input.now)),
        // Immutable there: of a static pod, whose class is computed twice, another one would be refused with the
        // whole status.
        qos_class: api.qos_class.clone().filter(|class| !class.is_empty()).or_else(|| own.qos_class.clone()),
        observed_generation: own.observed_generation.max(api.observed_generation),
        nominated_node_name: api.nominated_node_name.clone(),
        resize: api.resize.clone(),
        resource_claim_statuses: api.resource_claim_statuses.clone(),
        extended_resource_claim_status: api.extended_resource_claim_status.clone(),
        node_allocatable_resource_claim_statuses: api.node_allocatable_resource_claim_statuses.clone(),
        ..own.clone()
    };
    // A terminal phase set by others is acted on, not reverted.
    let reverted = is_ended(api) && !is_ended(own) && !input.is_mirror;
    if (ends && !sends_end) || reverted {
        merged.phase.clone_from(&api.phase);
        merged.reason.clone_from(&api.reason);
        merged.message.clone_from(&api.message);
    }
    if is_ended(&merged) {
        set_not_ready(&mut merged, input.now);
    }
    merged
}

fn merge_conditions(api: &PodStatus, own: &PodStatus, sends_end: bool, now: &Time) -> Vec<PodCondition> {
    let others = api.conditions.iter().flatten().filter(|c| !conditions::is_owned(&c.type_));
    let ours = own.conditions.iter().flatten().filter(|c| conditions::is_owned(&c.type_));
    let mut merged: Vec<PodCondition> = others.chain(ours).cloned().collect();
    let mut disruptions = own.conditions.iter().flatten().filter(|c| conditions::is_own_disruption(c));
    if let Some(disruption) = disruptions.next().filter(|_| sends_end) {
        let known = merged.iter().position(|c| c.type_ == disruption.type_);
        let unchanged = known.map(|at| &merged[at]).filter(|before| before.status == disruption.status);
        let since = unchanged.and_then(|before| before.last_transition_time.clone());
        let sent =
            PodCondition { last_transition_time: Some(since.unwrap_or_else(|| now.clone())), ..disruption.clone() };
        match known {
            Some(at) => merged[at] = sent,
            None => merged.push(sent),
        }
    }
    merged
}

const READINESS: [&str; 2] = [conditions::READY, conditions::CONTAINERS_READY];

/// A terminal pod is not ready, whatever its last status says. Both conditions get the reason, even if only one was True.
fn set_not_ready(status: &mut PodStatus, now: &Time) {
    let reason = if status.phase.as_deref() == Some("Succeeded") { "PodCompleted" } else { "PodFailed" };
    let observed_generation = status.observed_generation;
    let list = status.conditions.get_or_insert_default();
    if !list.iter().any(|c| READINESS.contains(&c.type_.as_str()) && c.status == "True") {
        return;
    }
    for type_ in READINESS {
        let known = list.iter().position(|c| c.type_ == type_);
        let since = known.map(|at| &list[at]).filter(|before| before.status == "False");
        let since = since.and_then(|before| before.last_transition_time.clone());
        let denied = PodCondition {
            type_: type_.to_owned(),
            status: "False".to_owned(),
            reason: Some(reason.to_owned()),
            last_transition_time: Some(since.unwrap_or_else(|| now.clone())),
            observed_generation,
            ..PodCondition::default()
        };
        match known {
            Some(at) => list[at] = PodCondition { observed_generation: list[at].observed_generation, ..denied },
            None => list.push(denied),
        }
    }
}
