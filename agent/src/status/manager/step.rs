//! What is to be done next for one pod. Pure.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;

use super::diff;
use super::merge::Circumstances;
use super::merge::merge;
use crate::model::PodUid;
use crate::model::spec;
use crate::status::Stored;
use crate::status::phase::is_terminal;

/// One request, or none.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// The API says what there is to say.
    Nothing,
    /// Send this patch of its status.
    Patch(Value),
    /// This patch may wait for a status that has more to say.
    Later(Value),
    /// This one too, while the node is busy with starting the pod: it says no more than that.
    Starting(Value),
    /// The pod is over and its deletion was asked for: delete it for good.
    Delete,
}

/// The next step for the pod with this UID on the node, by the newest known `copy` of it at the API server. The status
/// always goes before the deletion.
pub(super) fn next(uid: &PodUid, stored: &Stored, copy: &Pod, now: &Time) -> Step {
    let is_mirror = is_mirror(uid, copy);
    let nothing = PodStatus::default();
    let api = copy.status.as_ref().unwrap_or(&nothing);
    let wanted = merge(api, &stored.status, Circumstances { may_run: stored.may_run, is_mirror, now });
    let copy_uid = copy.metadata.uid.as_deref().unwrap_or_default();
    if let Some(patch) = diff::patch(copy_uid, api, &wanted) {
        // That the agent has heard of the deletion need not cost a request: the pod's end is about to be told.
        let can_wait = spec::deletion_requested(copy) && !stored.is_finished && diff::only_observes(&patch);
        return match can_wait {
            true => Step::Later(patch),
            false if is_first_word(api, &wanted) => Step::Starting(patch),
            false => Step::Patch(patch),
        };
    }
    let is_over = api.phase.as_deref().is_some_and(is_terminal) && stored.is_finished;
    if is_over && spec::deletion_requested(copy) && !is_mirror {
        return Step::Delete;
    }
    Step::Nothing
}

/// Nothing is known of the pod's containers there, and nothing is to be said but that they will be created.
fn is_first_word(api: &PodStatus, wanted: &PodStatus) -> bool {
    let containers = |status: &PodStatus| {
        let init = status.init_container_statuses.clone().unwrap_or_default();
        [init, status.container_statuses.clone().unwrap_or_default()].concat()
    };
    let is_to_come = |container: &ContainerStatus| {
        let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
        let reason = waiting.and_then(|waiting| waiting.reason.as_deref());
        container.restart_count == 0 && matches!(reason, Some("ContainerCreating" | "PodInitializing"))
    };
    wanted.phase.as_deref() == Some("Pending")
        && containers(api).is_empty()
        && containers(wanted).iter().all(is_to_come)
}

/// A copy with another UID is the mirror of a static pod.
fn is_mirror(uid: &PodUid, copy: &Pod) -> bool {
    copy.metadata.uid.as_deref() != Some(uid.as_str())
}
