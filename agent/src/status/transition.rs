//! From one status of a pod to the next: what must not happen, what counts as a change, and when conditions turned.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::model::restart;
use crate::model::restart::RestartGates;
use crate::model::restart::RestartPolicy;
use crate::model::spec;

use super::conditions;
use super::state;

/// A status that contradicts the one before; it is not taken over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IllegalTransition {
    /// A container that ended for good would be alive again.
    #[error("terminated {kind} {name} attempted illegal transition to non-terminated state")]
    Revived {
        /// `container` or `init container`.
        kind: &'static str,
        /// The container's name.
        name: String,
    },
    /// `status.initContainerStatuses` is not about the containers of `spec.initContainers`.
    #[error("status of init container {name} at position {index} has no counterpart in spec.initContainers")]
    Misaligned {
        /// Position in the status list.
        index: usize,
        /// The name found there.
        name: String,
    },
}

/// Refuses statuses in which a container that must not run again is no longer terminated. Pods that always restart,
/// or may restart all containers, are not checked; neither are sidecars.
pub(super) fn check(pod: &Pod, old: &PodStatus, new: &PodStatus, gates: RestartGates) -> Result<(), IllegalTransition> {
    let may_restart_all = || spec::lasting_containers(pod).any(|c| restart::may_restart_all(c.spec, gates));
    if RestartPolicy::of_pod(pod) == RestartPolicy::Always || may_restart_all() {
        return Ok(());
    }
    let check = |kind, container, old: &ContainerStatus, new: Option<&[ContainerStatus]>| {
        let ended = state::terminated(old.state.as_ref());
        let for_good = ended.is_some_and(|end| !restart::restarts_after(pod, container, end.exit_code, gates));
        let lives = |new: &ContainerStatus| new.name == old.name && state::terminated(new.state.as_ref()).is_none();
        if for_good && new.unwrap_or_default().iter().any(lives) {
            return Err(IllegalTransition::Revived { kind, name: old.name.clone() });
        }
        Ok(())
    };
    for old in old.container_statuses.iter().flatten() {
        if let Some(container) = spec::regular_containers(pod).iter().find(|c| c.name == old.name) {
            check("container", container, old, new.container_statuses.as_deref())?;
        }
    }
    for (index, old) in old.init_container_statuses.iter().flatten().enumerate() {
        let container = spec::init_containers(pod).get(index).filter(|container| container.name == old.name);
        let container = container.ok_or_else(|| IllegalTransition::Misaligned { index, name: old.name.clone() })?;
        if !spec::is_sidecar(container) {
            check("init container", container, old, new.init_container_statuses.as_deref())?;
        }
    }
    Ok(())
}

/// Keeps the time of each condition written here that has not turned; it is `now` for those that have.
pub(super) fn set_condition_times(old: &PodStatus, new: &mut PodStatus, now: &Time) {
    for condition in new.conditions.iter_mut().flatten().filter(|c| conditions::is_written_here(&c.type_)) {
        let before = old.conditions.iter().flatten().find(|c| c.type_ == condition.type_);
        let unturned = before.filter(|before| before.status == condition.status);
        let since = unturned.and_then(|before| before.last_transition_time.clone());
        condition.last_transition_time = Some(since.unwrap_or_else(|| now.clone()));
    }
}

/// True if nothing the agent is responsible for differs. Conditions of others and resource claims do not count, nor
/// do the times and generations of conditions.
pub(super) fn is_same(old: &PodStatus, new: &PodStatus) -> bool {
    let bare = |status: &PodStatus| PodStatus {
        conditions: None,
        resource_claim_statuses: None,
        extended_resource_claim_status: None,
        node_allocatable_resource_claim_statuses: None,
        ..status.clone()
    };
    bare(old) == bare(new) && same_conditions(old, new)
}

fn same_conditions(old: &PodStatus, new: &PodStatus) -> bool {
    let own = |status: &PodStatus| -> Vec<PodCondition> {
        let own = status.conditions.iter().flatten().filter(|c| conditions::is_written_here(&c.type_));
        let mut own: Vec<_> =
            own.map(|c| PodCondition { last_transition_time: None, observed_generation: None, ..c.clone() }).collect();
        own.sort_by(|a, b| a.type_.cmp(&b.type_));
        own
    };
    own(old) == own(new)
}
