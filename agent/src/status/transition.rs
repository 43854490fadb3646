//! From one status of a pod to the next: what is rejected, what counts as a change, transition times of conditions.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::conditions;
use crate::model::restart;
use crate::model::restart::RestartGates;
use crate::model::restart::RestartPolicy;
use crate::model::spec;

/// A status update that contradicts the pod's spec and is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IllegalTransition {
    /// `status.initContainerStatuses` does not match `spec.initContainers`.
    #[error("status of init container {name} at position {index} has no counterpart in spec.initContainers")]
    Misaligned {
        /// Position in the status list.
        index: usize,
        /// The name found there.
        name: String,
    },
}

/// Rejects the successor of a status whose init containers are not those of the spec. Pods with restart policy `Always` or a
/// rule `RestartAllContainers` are not checked. A container whose end is final may run again, in another sandbox for
/// example: upstream rejects such a status, with everything else in it. Here that container alone keeps its end at the
/// API server, see `manager::final_ends`.
///
/// # Errors
/// The first init container that is not the one of the spec.
pub(super) fn check(pod: &Pod, old: &PodStatus, gates: RestartGates) -> Result<(), IllegalTransition> {
    let may_restart_all = || spec::lasting_containers(pod).any(|c| restart::may_restart_all(c.spec, gates));
    if RestartPolicy::of_pod(pod) == RestartPolicy::Always || may_restart_all() {
        return Ok(());
    }
    let containers = spec::init_containers(pod);
    for (index, old) in old.init_container_statuses.iter().flatten().enumerate() {
        if containers.get(index).is_none_or(|container| container.name != old.name) {
            return Err(IllegalTransition::Misaligned { index, name: old.name.clone() });
        }
    }
    Ok(())
}

/// Keeps the transition time of each condition of the agent whose status is unchanged; sets it to `now` for the others. Those
/// of resizes have their times.
pub(super) fn set_condition_times(old: &PodStatus, new: &mut PodStatus, now: &Time) {
    let is_untimed =
        |c: &&mut PodCondition| conditions::is_written_by_agent(&c.type_) && !conditions::is_timed(&c.type_);
    for condition in new.conditions.iter_mut().flatten().filter(is_untimed) {
        let before = old.conditions.iter().flatten().find(|c| c.type_ == condition.type_);
        let unchanged = before.filter(|before| before.status == condition.status);
        let since = unchanged.and_then(|before| before.last_transition_time.clone());
        condition.last_transition_time = Some(since.unwrap_or_else(|| now.clone()));
    }
}

/// True if no field owned by the agent differs. Ignores foreign conditions, resource claims, and times and generations of
/// conditions.
pub(super) fn is_same(old: &PodStatus, new: &PodStatus) -> bool {
    // Without `..`: a field that the API gets is to be compared too, or left to its owner.
    let PodStatus {
        allocated_resources,
        conditions: _,
        container_statuses,
        ephemeral_container_statuses,
        extended_resource_claim_status: _,
        host_ip,
        host_ips,
        init_container_statuses,
        message,
        node_allocatable_resource_claim_statuses: _,
        nominated_node_name,
        observed_generation,
        phase,
        pod_ip,
        pod_ips,
        qos_class,
        reason,
        resize,
        resource_claim_statuses: _,
        resources,
        start_time,
    } = old;
    *phase == new.phase
        && *reason == new.reason
        && *message == new.message
        && *container_statuses == new.container_statuses
        && *init_container_statuses == new.init_container_statuses
        && *ephemeral_container_statuses == new.ephemeral_container_statuses
        && *host_ip == new.host_ip
        && *host_ips == new.host_ips
        && *pod_ip == new.pod_ip
        && *pod_ips == new.pod_ips
        && *qos_class == new.qos_class
        && *allocated_resources == new.allocated_resources
        && *resources == new.resources
        && *resize == new.resize
        && *nominated_node_name == new.nominated_node_name
        && *observed_generation == new.observed_generation
        && *start_time == new.start_time
        && same_conditions(old, new)
}

fn same_conditions(old: &PodStatus, new: &PodStatus) -> bool {
    let (old, new) = (own_conditions(old), own_conditions(new));
    old.len() == new.len() && old.into_iter().zip(new).all(|(old, new)| is_same_condition(old, new))
}

/// The conditions that the agent writes, by type.
fn own_conditions(status: &PodStatus) -> Vec<&PodCondition> {
    let own = status.conditions.iter().flatten().filter(|c| conditions::is_written_by_agent(&c.type_));
    let mut own: Vec<&PodCondition> = own.collect();
    own.sort_by(|a, b| a.type_.cmp(&b.type_));
    own
}

fn is_same_condition(old: &PodCondition, new: &PodCondition) -> bool {
    let PodCondition {
        last_probe_time,
        last_transition_time: _,
        message,
        observed_generation: _,
        reason,
        status,
        type_,
    } = old;
    (type_, status, reason, message, last_probe_time)
        == (&new.type_, &new.status, &new.reason, &new.message, &new.last_probe_time)
}
