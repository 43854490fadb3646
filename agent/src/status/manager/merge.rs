//! What the API's copy of a pod should say, from what it says and what the agent has to say. Pure.
//!
//! The agent's word counts, except for what others own: foreign conditions, resource claims, the nominated node. An end
//! is told only once nothing of the pod can run any more.

use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::status::conditions;
use crate::status::phase::is_terminal;

/// Beyond the two statuses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Circumstances<'a> {
    /// Some container of the pod may still run.
    pub may_run: bool,
    /// The copy only shows a static pod.
    pub is_mirror: bool,
    /// For conditions that turn by being told.
    pub now: &'a Time,
}

/// The status the copy should have.
pub(super) fn merge(api: &PodStatus, own: &PodStatus, circumstances: Circumstances<'_>) -> PodStatus {
    let ended = |status: &PodStatus| status.phase.as_deref().is_some_and(is_terminal);
    let ends = !ended(api) && ended(own);
    let told_end = ends && !circumstances.may_run;
    let mut merged = PodStatus {
        conditions: Some(merge_conditions(api, own, told_end, circumstances.now)),
        qos_class: own.qos_class.clone().or_else(|| api.qos_class.clone()),
        observed_generation: own.observed_generation.max(api.observed_generation),
        nominated_node_name: api.nominated_node_name.clone(),
        resize: api.resize.clone(),
        resource_claim_statuses: api.resource_claim_statuses.clone(),
        extended_resource_claim_status: api.extended_resource_claim_status.clone(),
        node_allocatable_resource_claim_statuses: api.node_allocatable_resource_claim_statuses.clone(),
        ..own.clone()
    };
    // Somebody else may have ended the pod: that is for the agent to act on, not to take back.
    let taken_back = ended(api) && !ended(own) && !circumstances.is_mirror;
    if (ends && !told_end) || taken_back {
        merged.phase.clone_from(&api.phase);
        merged.reason.clone_from(&api.reason);
        merged.message.clone_from(&api.message);
    }
    if ended(&merged) {
        deny_readiness(&mut merged, circumstances.now);
    }
    merged
}

fn merge_conditions(api: &PodStatus, own: &PodStatus, told_end: bool, now: &Time) -> Vec<PodCondition> {
    let others = api.conditions.iter().flatten().filter(|c| !conditions::is_owned(&c.type_));
    let ours = own.conditions.iter().flatten().filter(|c| conditions::is_owned(&c.type_));
    let mut merged: Vec<PodCondition> = others.chain(ours).cloned().collect();
    let mut shared = own.conditions.iter().flatten().filter(|c| conditions::is_shared(&c.type_));
    if let Some(disruption) = shared.next().filter(|_| told_end) {
        let known = merged.iter().position(|c| c.type_ == disruption.type_);
        let unturned = known.map(|at| &merged[at]).filter(|before| before.status == disruption.status);
        let since = unturned.and_then(|before| before.last_transition_time.clone());
        let told =
            PodCondition { last_transition_time: Some(since.unwrap_or_else(|| now.clone())), ..disruption.clone() };
        match known {
            Some(at) => merged[at] = told,
            None => merged.push(told),
        }
    }
    merged
}

/// A pod that is over is not ready, whatever was known of it last.
fn deny_readiness(status: &mut PodStatus, now: &Time) {
    let reason = if status.phase.as_deref() == Some("Succeeded") { "PodCompleted" } else { "PodFailed" };
    for condition in status.conditions.iter_mut().flatten() {
        let is_readiness = [conditions::READY, conditions::CONTAINERS_READY].contains(&condition.type_.as_str());
        if is_readiness && condition.status == "True" {
            "False".clone_into(&mut condition.status);
            condition.reason = Some(reason.to_owned());
            condition.message = None;
            condition.last_transition_time = Some(now.clone());
        }
    }
}
