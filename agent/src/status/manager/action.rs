//! The next request for one pod. Pure.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;

use super::diff;
use super::final_ends::keep_final_ends;
use super::merge::MergeInput;
use super::merge::merge;
use crate::model::PodUid;
use crate::model::spec;
use crate::status::Stored;
use crate::status::phase::is_terminal;

/// The next request about a pod, or none.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum SyncAction {
    /// The API copy is up to date.
    None,
    /// PATCH the status.
    Patch(Value),
    /// PATCH the status; may be deferred, because it only updates `observedGeneration` of a pod that terminates.
    DeferrablePatch(Value),
    /// PATCH the first status of a pod, which only says that its containers will be created.
    FirstPatch(Value),
    /// DELETE the terminated pod with grace period 0.
    Delete,
}

/// The next request for the pod with this UID, given the newest known API `copy`. The final status is always sent before
/// the deletion. A patch that has no effect is returned again: the caller then calls [`may_delete`].
pub(super) fn next(uid: &PodUid, stored: &Stored, copy: &Pod, now: &Time) -> SyncAction {
    let is_mirror = is_mirror(uid, copy);
    let nothing = PodStatus::default();
    let api = copy.status.as_ref().unwrap_or(&nothing);
    let mut wanted = merge(api, &stored.status, MergeInput { may_run: stored.may_run, is_mirror, now });
    keep_final_ends(copy, &mut wanted, now);
    let copy_uid = copy.metadata.uid.as_deref().unwrap_or_default();
    if let Some(patch) = diff::patch(copy_uid, api, &wanted) {
        // The final status follows soon and carries the same generation.
        let deferrable = spec::deletion_requested(copy) && !stored.is_finished && diff::only_observes(&patch);
        return match deferrable {
            true => SyncAction::DeferrablePatch(patch),
            false if is_first_status(api, &wanted) => SyncAction::FirstPatch(patch),
            false => SyncAction::Patch(patch),
        };
    }
    if may_delete(uid, stored, copy) { SyncAction::Delete } else { SyncAction::None }
}

/// True if the API copy is to be deleted, as far as the API server keeps what it was sent.
pub(super) fn may_delete(uid: &PodUid, stored: &Stored, copy: &Pod) -> bool {
    let phase = copy.status.as_ref().and_then(|status| status.phase.as_deref());
    let has_ended = stored.is_finished && phase.is_some_and(is_terminal);
    has_ended && spec::deletion_requested(copy) && !is_mirror(uid, copy)
}

/// True if the API copy has no container statuses and the new one only has containers that will be created.
fn is_first_status(api: &PodStatus, wanted: &PodStatus) -> bool {
    let containers = |status: &PodStatus| {
        let init = status.init_container_statuses.clone().unwrap_or_default();
        [init, status.container_statuses.clone().unwrap_or_default()].concat()
    };
    let is_creating = |container: &ContainerStatus| {
        let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
        let reason = waiting.and_then(|waiting| waiting.reason.as_deref());
        container.restart_count == 0 && matches!(reason, Some("ContainerCreating" | "PodInitializing"))
    };
    wanted.phase.as_deref() == Some("Pending")
        && containers(api).is_empty()
        && containers(wanted).iter().all(is_creating)
}

/// A copy with another UID is the mirror pod of a static pod.
fn is_mirror(uid: &PodUid, copy: &Pod) -> bool {
    copy.metadata.uid.as_deref() != Some(uid.as_str())
}
