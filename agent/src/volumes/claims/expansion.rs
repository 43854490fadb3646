//! Whether a volume of a claim is to be expanded to the capacity of its persistent volume, and what the claim's status says of
//! that (KEP-284, KEP-1790). Pure.
//!
//! The capacity of a local volume is changed by the administrator who has enlarged its disk, that of a FlexVolume alike. A
//! controller that resizes claims may take part: it records its steps in the status, and this node goes on only from the
//! steps that are the node's.

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::core::v1::PersistentVolumeClaimStatus;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use serde_json::json;

use crate::model::Amount;

const STORAGE: &str = "storage";
const PENDING: &str = "NodeResizePending";
const IN_PROGRESS: &str = "NodeResizeInProgress";
const INFEASIBLE: &str = "NodeResizeInfeasible";
const FAILED: &str = "NodeResizeError";
/// Conditions of a resize, which are over with it.
const CONDITIONS: [&str; 4] = ["FileSystemResizePending", "Resizing", "ControllerResizeError", FAILED];

/// What is to be done about the size of a volume.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Need {
    Nothing,
    /// It would be expanded, and the pod uses the claim read-only.
    ReadOnly,
    Expand(Expansion),
}

/// An expansion that this node has to perform.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Expansion {
    /// Bytes that the claim has.
    pub(super) from: i64,
    /// The claim's capacity afterwards.
    pub(super) to: Quantity,
    /// The controller records its steps in the claim.
    pub(super) is_recorded: bool,
    /// It has failed before and another size is requested now: after one more failure the controller continues with that.
    pub(super) is_last: bool,
}

impl Expansion {
    /// Bytes that the claim has afterwards.
    pub(super) fn bytes(&self) -> i64 {
        amount(Some(&self.to)).value()
    }
}

/// What is to be done. `read_only`: how the pod uses the claim.
pub(super) fn need(claim: &PersistentVolumeClaim, volume: &PersistentVolume, read_only: bool) -> Need {
    let spec = volume.spec.as_ref();
    let is_bound = spec.and_then(|spec| spec.claim_ref.as_ref()).is_some_and(|bound| bound.uid == claim.metadata.uid);
    let capacity = spec.and_then(|spec| spec.capacity.as_ref()?.get(STORAGE));
    let (Some(status), Some(capacity)) = (claim.status.as_ref(), capacity.filter(|_| is_bound)) else {
        return Need::Nothing;
    };
    let has = amount(status.capacity.as_ref().and_then(|capacity| capacity.get(STORAGE)));
    if !has.is_positive() || has >= amount(Some(capacity)) {
        return Need::Nothing;
    }
    if read_only {
        return Need::ReadOnly;
    }
    let (from, step) = (has.value(), step(status));
    if step.is_empty() && status.allocated_resources.is_none() {
        return Need::Expand(Expansion { from, to: capacity.clone(), is_recorded: false, is_last: false });
    }
    let allocated = status.allocated_resources.as_ref().and_then(|allocated| allocated.get(STORAGE));
    match allocated.filter(|_| matches!(step, PENDING | IN_PROGRESS)) {
        Some(to) => {
            let is_last = requested(claim) != amount(Some(to)) && has_failed(status);
            Need::Expand(Expansion { from, to: to.clone(), is_recorded: true, is_last })
        }
        // The next step is the controller's, or the resize is over.
        None => Need::Nothing,
    }
}

/// A quantity that is missing or none counts as zero.
fn amount(quantity: Option<&Quantity>) -> Amount {
    quantity.and_then(|quantity| Amount::try_from(quantity).ok()).unwrap_or_default()
}

fn requested(claim: &PersistentVolumeClaim) -> Amount {
    let resources = claim.spec.as_ref().and_then(|spec| spec.resources.as_ref());
    amount(resources.and_then(|resources| resources.requests.as_ref()?.get(STORAGE)))
}

/// The step of the resize that the status states; empty if none.
fn step(status: &PersistentVolumeClaimStatus) -> &str {
    let steps = status.allocated_resource_statuses.as_ref();
    steps.and_then(|steps| steps.get(STORAGE)).map_or("", String::as_str)
}

fn has_failed(status: &PersistentVolumeClaimStatus) -> bool {
    status.conditions.iter().flatten().any(|condition| condition.type_ == FAILED && condition.status == "True")
}

/// The patch of the status that says that a recorded expansion has begun; `None` if it says so.
pub(super) fn begun(claim: &PersistentVolumeClaim) -> Option<Value> {
    let is_begun = claim.status.as_ref().is_some_and(|status| step(status) == IN_PROGRESS);
    (!is_begun).then(|| patch(claim, json!({"allocatedResourceStatuses": {STORAGE: IN_PROGRESS}})))
}

/// The patch of the status after an expansion.
pub(super) fn finished(claim: &PersistentVolumeClaim, expansion: &Expansion) -> Value {
    let mut status = json!({"capacity": {STORAGE: expansion.to}});
    let old = claim.status.as_ref();
    if old.is_some_and(|old| old.allocated_resource_statuses.is_some()) {
        status["allocatedResourceStatuses"] = json!({STORAGE: null});
    }
    let conditions = old.and_then(|old| old.conditions.as_deref()).unwrap_or_default().iter();
    let over = conditions.filter(|condition| CONDITIONS.contains(&condition.type_.as_str()));
    let over: Vec<Value> = over.map(|condition| json!({"$patch": "delete", "type": condition.type_})).collect();
    if !over.is_empty() {
        status["conditions"] = over.into();
    }
    patch(claim, status)
}

/// The patch of the status after a recorded expansion has failed; `None` if it says so. It names no version: other changes of the
/// claim do not matter.
pub(super) fn failed(
    claim: &PersistentVolumeClaim,
    expansion: &Expansion,
    error: &str,
    now: Timestamp,
) -> Option<Value> {
    let mut status = json!({});
    if expansion.is_last {
        status["allocatedResourceStatuses"] = json!({STORAGE: INFEASIBLE});
    }
    if !claim.status.as_ref().is_some_and(has_failed) {
        let message = format!("failed to expand pvc with {error}");
        let time = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let condition = json!({"type": FAILED, "status": "True", "lastTransitionTime": time, "message": message});
        status["conditions"] = json!([condition]);
    }
    (status != json!({})).then(|| json!({"status": status}))
}

/// A patch of the status that is refused if the claim has changed.
fn patch(claim: &PersistentVolumeClaim, status: Value) -> Value {
    json!({"metadata": {"resourceVersion": claim.metadata.resource_version}, "status": status})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(status: Value) -> PersistentVolumeClaim {
        serde_json::from_value(json!({"metadata": {"name": "data", "uid": "c-1", "resourceVersion": "7"},
            "spec": {"resources": {"requests": {"storage": "2Gi"}}}, "status": status}))
        .expect("a claim")
    }

    fn volume(capacity: &str) -> PersistentVolume {
        serde_json::from_value(json!({"metadata": {"name": "pv"},
            "spec": {"capacity": {"storage": capacity}, "claimRef": {"uid": "c-1"}}}))
        .expect("a volume")
    }

    fn expands(to: &str, is_recorded: bool, is_last: bool) -> Need {
        Need::Expand(Expansion { from: 1 << 30, to: Quantity(to.to_owned()), is_recorded, is_last })
    }

    #[test]
    fn a_claim_with_less_than_its_volume_is_expanded() {
        for (has, capacity, read_only, expected) in [
            ("1Gi", "2Gi", false, expands("2Gi", false, false)),
            ("1Gi", "2Gi", true, Need::ReadOnly),
            ("2Gi", "2Gi", false, Need::Nothing),
            ("2048Mi", "2Gi", true, Need::Nothing),
            ("3Gi", "2Gi", false, Need::Nothing),
            ("0", "2Gi", false, Need::Nothing),
        ] {
            let claim = claim(json!({"capacity": {"storage": has}}));
            assert_eq!(need(&claim, &volume(capacity), read_only), expected, "{has} of {capacity}");
        }
        assert_eq!(need(&claim(json!({})), &volume("2Gi"), false), Need::Nothing, "its size is not known");
        let mut other = claim(json!({"capacity": {"storage": "1Gi"}}));
        other.metadata.uid = Some("c-2".to_owned());
        assert_eq!(need(&other, &volume("2Gi"), false), Need::Nothing, "another claim has taken its name");
    }

    #[test]
    fn a_recorded_resize_is_continued_when_it_is_the_turn_of_the_node() {
        let status = |step: &str, allocated: &str, conditions: Value| {
            claim(json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": allocated},
                "allocatedResourceStatuses": {"storage": step}, "conditions": conditions}))
        };
        let failed = json!([{"type": "NodeResizeError", "status": "True"}]);
        for (step, allocated, conditions, expected) in [
            ("NodeResizePending", "2Gi", json!([]), expands("2Gi", true, false)),
            ("NodeResizeInProgress", "2Gi", json!([]), expands("2Gi", true, false)),
            ("NodeResizeInProgress", "2Gi", failed.clone(), expands("2Gi", true, false)),
            ("NodeResizeInProgress", "3Gi", json!([]), expands("3Gi", true, false)),
            ("NodeResizeInProgress", "3Gi", failed, expands("3Gi", true, true)),
            ("ControllerResizeInProgress", "2Gi", json!([]), Need::Nothing),
            ("NodeResizeInfeasible", "2Gi", json!([]), Need::Nothing),
            ("", "2Gi", json!([]), Need::Nothing),
        ] {
            let claim = status(step, allocated, conditions);
            assert_eq!(need(&claim, &volume("3Gi"), false), expected, "{step} {allocated}");
        }
        let unallocated = claim(
            json!({"capacity": {"storage": "1Gi"}, "allocatedResourceStatuses": {"storage": "NodeResizePending"}}),
        );
        assert_eq!(need(&unallocated, &volume("3Gi"), false), Need::Nothing);
    }

    #[test]
    fn patches_change_what_the_resize_changes() {
        let plain = claim(json!({"capacity": {"storage": "1Gi"}}));
        let Need::Expand(expansion) = need(&plain, &volume("2Gi"), false) else { panic!("it is too small") };
        let version = json!({"resourceVersion": "7"});
        let expected = json!({"metadata": version, "status": {"capacity": {"storage": "2Gi"}}});
        assert_eq!(finished(&plain, &expansion), expected);

        let pending = claim(json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": "NodeResizePending"},
            "conditions": [{"type": "FileSystemResizePending", "status": "True"}, {"type": "Other", "status": "True"}]}));
        let expected = json!({"metadata": version,
            "status": {"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}}});
        assert_eq!(begun(&pending), Some(expected));
        let expected = json!({"metadata": version, "status": {"capacity": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": null},
            "conditions": [{"$patch": "delete", "type": "FileSystemResizePending"}]}});
        assert_eq!(finished(&pending, &expansion), expected);
    }

    #[test]
    fn a_failure_is_recorded_once() {
        let claim = |conditions: Value| {
            claim(json!({"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}, "conditions": conditions}))
        };
        let (fresh, known) = (claim(json!([])), claim(json!([{"type": "NodeResizeError", "status": "True"}])));
        assert_eq!(begun(&fresh), None);
        let to = Quantity("2Gi".to_owned());
        let expansion = |is_last| Expansion { from: 1 << 30, to: to.clone(), is_recorded: true, is_last };
        let condition = json!({"type": "NodeResizeError", "status": "True",
            "lastTransitionTime": "1970-01-01T00:00:00Z", "message": "failed to expand pvc with no room"});
        let patch = |claim, is_last| failed(claim, &expansion(is_last), "no room", Timestamp::UNIX_EPOCH);
        assert_eq!(patch(&fresh, false), Some(json!({"status": {"conditions": [condition]}})));
        assert_eq!(patch(&known, false), None);
        let infeasible = json!({"status": {"allocatedResourceStatuses": {"storage": "NodeResizeInfeasible"}}});
        assert_eq!(patch(&known, true), Some(infeasible));
    }
}
