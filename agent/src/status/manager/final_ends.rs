//! Terminations of containers that the API server treats as final. Pure.
//!
//! It refuses a whole status in which such a container runs or waits again, so that no client would see the pod's address,
//! readiness and phase. A container can run again all the same: all of them start in a new sandbox, whatever their own
//! policies say, and the runtime may have lost an ephemeral one.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::model::restart;
use crate::model::restart::RestartGates;
use crate::model::spec;
use crate::status::conditions;
use crate::status::state;

/// Replaces containers of `merged` that run or wait again by their final ends in `copy`, the API server's. The pod's
/// readiness follows from what is left; `now` is the transition time of conditions that change by that.
pub(super) fn keep_final_ends(copy: &Pod, merged: &mut PodStatus, now: &Time) {
    let Some(api) = &copy.status else { return };
    // The API server's gates are not known here. Without them it has dropped the policies and rules from the spec.
    let gates = RestartGates::default();
    let restarts_all = spec::lasting_containers(copy).any(|container| restart::may_restart_all(container.spec, gates));
    let containers = spec::lasting_by_name(copy);
    let is_final = |status: &ContainerStatus, exit_code| {
        let container = containers.get(status.name.as_str());
        container.is_some_and(|of| !restarts_all && !restart::restarts_after(copy, of.spec, exit_code, gates))
    };
    let keeps_init = keep(&api.init_container_statuses, &mut merged.init_container_statuses, is_final);
    let keeps_regular = keep(&api.container_statuses, &mut merged.container_statuses, is_final);
    keep(&api.ephemeral_container_statuses, &mut merged.ephemeral_container_statuses, |_, _| true);
    if keeps_init || keeps_regular {
        derive_readiness(copy, api, merged, now);
    }
}

/// Derives the conditions that depend on the readiness of containers again. They observe the generation that they did.
fn derive_readiness(copy: &Pod, api: &PodStatus, merged: &mut PodStatus, now: &Time) {
    let own = merged.conditions.clone().unwrap_or_default();
    conditions::update_readiness(copy, merged);
    for condition in merged.conditions.iter_mut().flatten() {
        let Some(before) = own.iter().find(|before| before.type_ == condition.type_) else { continue };
        condition.observed_generation = before.observed_generation;
        if condition.status == before.status {
            condition.last_transition_time.clone_from(&before.last_transition_time);
            continue;
        }
        let sent = api.conditions.iter().flatten().find(|sent| sent.type_ == condition.type_);
        let unchanged = sent.filter(|sent| sent.status == condition.status);
        let since = unchanged.and_then(|sent| sent.last_transition_time.clone());
        condition.last_transition_time = Some(since.unwrap_or_else(|| now.clone()));
    }
}

/// True if one was replaced.
fn keep(
    api: &Option<Vec<ContainerStatus>>,
    merged: &mut Option<Vec<ContainerStatus>>,
    is_final: impl Fn(&ContainerStatus, i32) -> bool,
) -> bool {
    let has_ended = |status: &ContainerStatus| state::terminated(status.state.as_ref()).map(|end| end.exit_code);
    let ends = api.iter().flatten().filter(|status| has_ended(status).is_some_and(|code| is_final(status, code)));
    let ends: HashMap<&str, &ContainerStatus> = ends.map(|status| (status.name.as_str(), status)).collect();
    let mut replaces = false;
    for status in merged.iter_mut().flatten().filter(|status| has_ended(status).is_none()) {
        if let Some(end) = ends.get(status.name.as_str()) {
            status.clone_from(end);
            replaces = true;
        }
    }
    replaces
}
