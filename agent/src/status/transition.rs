//! From one status of a pod to the next: illegal transitions, what counts as a change, transition times of conditions.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::conditions;
use super::containers::statuses_by_name;
use super::state;
use crate::model::restart;
use crate::model::restart::RestartGates;
use crate::model::restart::RestartPolicy;
use crate::model::spec;

/// A status update that contradicts the previous status and is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IllegalTransition {
    /// A terminated container that must not restart would become non-terminated.
    #[error("terminated {kind} {name} attempted illegal transition to non-terminated state")]
    NonTerminated {
        /// `container` or `init container`.
        kind: &'static str,
        /// The container's name.
        name: String,
    },
    /// `status.initContainerStatuses` does not match `spec.initContainers`.
    #[error("status of init container {name} at position {index} has no counterpart in spec.initContainers")]
    Misaligned {
        /// Position in the status list.
        index: usize,
        /// The name found there.
        name: String,
    },
}

/// Rejects a status in which a container that must not restart is no longer terminated. Pods with restart policy
/// `Always` or a rule `RestartAllContainers` are not checked, nor are sidecars.
///
/// # Errors
/// The first illegal transition found.
pub(super) fn check(pod: &Pod, old: &PodStatus, new: &PodStatus, gates: RestartGates) -> Result<(), IllegalTransition> {
    let may_restart_all = || spec::lasting_containers(pod).any(|c| restart::may_restart_all(c.spec, gates));
    if RestartPolicy::of_pod(pod) == RestartPolicy::Always || may_restart_all() {
        return Ok(());
    }
    let check = |kind, container, old: &ContainerStatus, new: &HashMap<&str, &ContainerStatus>| {
        let terminated = state::terminated(old.state.as_ref());
        let is_final = terminated.is_some_and(|old| !restart::restarts_after(pod, container, old.exit_code, gates));
        let new = new.get(old.name.as_str());
        if is_final && new.is_some_and(|new| state::terminated(new.state.as_ref()).is_none()) {
            return Err(IllegalTransition::NonTerminated { kind, name: old.name.clone() });
        }
        Ok(())
    };
    let regular: HashMap<&str, &Container> =
        spec::regular_containers(pod).iter().rev().map(|container| (container.name.as_str(), container)).collect();
    let of_regular = statuses_by_name(new.container_statuses.as_deref().unwrap_or_default());
    for old in old.container_statuses.iter().flatten() {
        if let Some(&container) = regular.get(old.name.as_str()) {
            check("container", container, old, &of_regular)?;
        }
    }
    let of_init = statuses_by_name(new.init_container_statuses.as_deref().unwrap_or_default());
    for (index, old) in old.init_container_statuses.iter().flatten().enumerate() {
        let container = spec::init_containers(pod).get(index).filter(|container| container.name == old.name);
        let container = container.ok_or_else(|| IllegalTransition::Misaligned { index, name: old.name.clone() })?;
        if !spec::is_sidecar(container) {
            check("init container", container, old, &of_init)?;
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
