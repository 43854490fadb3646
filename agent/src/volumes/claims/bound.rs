//! Whether a pod may use a claim and the persistent volume behind it. Pure; the messages are upstream's.

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;

use crate::objects::ObjectError;

const PROTECTION: &str = "kubernetes.io/pvc-protection";
const FILESYSTEM: &str = "Filesystem";
const BLOCK: &str = "Block";

/// Why a claim cannot be used; the volume is not set up at all.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{problem}", prefix(.namespace, .claim, .problem))]
pub struct ClaimError {
    /// Namespace of claim and pod.
    pub namespace: String,
    /// The claim's name.
    pub claim: String,
    /// What is wrong with it.
    pub problem: ClaimProblem,
}

/// What is wrong with a claim or its volume.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each case is")]
pub enum ClaimProblem {
    #[error("failed to fetch PVC from API server: {0}")]
    Unreadable(ObjectError),
    #[error("PVC is being deleted")]
    Deleted,
    #[error("PVC is not bound")]
    NotBound,
    #[error("PVC has empty pvc.Spec.VolumeName")]
    NoVolumeName,
    #[error("PVC {claim} was not created for pod {pod} (pod is not owner)")]
    NotOwned { claim: String, pod: String },
    #[error("failed to fetch PV {name} from API server: {error}")]
    UnreadableVolume { name: String, error: ObjectError },
    #[error("found PV object {0} but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim")]
    NoClaimRef(String),
    #[error("found PV object {name} but its pv.Spec.ClaimRef.UID {found} does not point to claim.UID {wanted}")]
    OtherClaim { name: String, found: String, wanted: String },
    #[error("volume {volume} has volumeMode {mode}, but is specified in {list}")]
    Mode { volume: String, mode: String, list: &'static str },
}

/// The claim in front of a problem. As upstream, it is not in front of one that names its object itself.
fn prefix(namespace: &str, claim: &str, problem: &ClaimProblem) -> String {
    match problem {
        ClaimProblem::NotOwned { .. } | ClaimProblem::Mode { .. } => String::new(),
        _ => format!("error processing PVC {namespace}/{claim}: "),
    }
}

/// The claim that a volume of the pod names; that of a generic ephemeral volume (KEP-1698) is named after both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClaimSource {
    pub(super) claim: String,
    /// The pod has to own the claim.
    pub(super) is_ephemeral: bool,
    pub(super) read_only: bool,
}

impl ClaimSource {
    pub(super) fn of(pod: &Pod, volume: &Volume) -> Option<Self> {
        if let Some(source) = &volume.persistent_volume_claim {
            let read_only = source.read_only.unwrap_or(false);
            return Some(Self { claim: source.claim_name.clone(), is_ephemeral: false, read_only });
        }
        volume.ephemeral.as_ref()?;
        let pod = pod.metadata.name.as_deref().unwrap_or_default();
        Some(Self { claim: format!("{pod}-{}", volume.name), is_ephemeral: true, read_only: false })
    }
}

/// Name of the persistent volume that the claim is bound to.
///
/// # Errors
/// The pod must not use the claim, or not yet.
pub(super) fn volume_of<'a>(
    claim: &'a PersistentVolumeClaim,
    wanted: &ClaimSource,
    pod: &Pod,
) -> Result<&'a str, ClaimProblem> {
    let meta = &claim.metadata;
    // As long as it is protected, pods that use it already may go on with it.
    let is_protected = meta.finalizers.iter().flatten().any(|name| name == PROTECTION);
    if meta.deletion_timestamp.is_some() && !is_protected {
        return Err(ClaimProblem::Deleted);
    }
    if claim.status.as_ref().and_then(|status| status.phase.as_deref()) != Some("Bound") {
        return Err(ClaimProblem::NotBound);
    }
    let name = claim.spec.as_ref().and_then(|spec| spec.volume_name.as_deref()).unwrap_or_default();
    if name.is_empty() {
        return Err(ClaimProblem::NoVolumeName);
    }
    let owners = || meta.owner_references.iter().flatten();
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    if wanted.is_ephemeral && !owners().any(|owner| owner.controller == Some(true) && owner.uid == uid) {
        let full = |name: &Option<String>| {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            format!("{namespace}/{}", name.as_deref().unwrap_or_default())
        };
        return Err(ClaimProblem::NotOwned { claim: full(&meta.name), pod: full(&pod.metadata.name) });
    }
    Ok(name)
}

/// In which lists of the pod's containers a volume is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Uses {
    /// `volumeMounts`.
    pub(super) mounted: bool,
    /// `volumeDevices`.
    pub(super) as_device: bool,
}

/// Checks that the persistent volume is bound to this claim, and has files if containers mount it, and is a device if they
/// use it as one.
///
/// # Errors
/// It is bound to another claim, or its mode does not fit.
pub(super) fn check_volume(
    found: &PersistentVolume,
    claim: &PersistentVolumeClaim,
    volume: &Volume,
    uses: Uses,
) -> Result<(), ClaimProblem> {
    let name = found.metadata.name.clone().unwrap_or_default();
    let spec = found.spec.as_ref();
    let Some(bound) = spec.and_then(|spec| spec.claim_ref.as_ref()) else {
        return Err(ClaimProblem::NoClaimRef(name));
    };
    let is_block = is_block(found);
    let (found, wanted) = (bound.uid.clone().unwrap_or_default(), claim.metadata.uid.clone().unwrap_or_default());
    if found != wanted {
        return Err(ClaimProblem::OtherClaim { name, found, wanted });
    }
    let (mode, wrong, list) = match is_block {
        true => (BLOCK, uses.mounted, "volumeMounts"),
        false => (FILESYSTEM, uses.as_device, "volumeDevices"),
    };
    match wrong {
        true => Err(ClaimProblem::Mode { volume: volume.name.clone(), mode: mode.to_owned(), list }),
        false => Ok(()),
    }
}

/// True if the persistent volume is a raw device.
pub(super) fn is_block(volume: &PersistentVolume) -> bool {
    volume.spec.as_ref().and_then(|spec| spec.volume_mode.as_deref()) == Some(BLOCK)
}

/// True if only one pod may use the volume at a time (KEP-2485).
pub(super) fn is_exclusive(volume: &PersistentVolume) -> bool {
    let modes = volume.spec.as_ref().and_then(|spec| spec.access_modes.as_ref());
    modes.is_some_and(|modes| modes.iter().any(|mode| mode == "ReadWriteOncePod"))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn merged(mut base: Value, more: Value) -> Value {
        fn merge(base: &mut Value, more: Value) {
            match (base, more) {
                (Value::Object(base), Value::Object(more)) => {
                    more.into_iter().for_each(|(key, value)| merge(base.entry(key).or_insert(Value::Null), value));
                }
                (base, more) => *base = more,
            }
        }
        merge(&mut base, more);
        base
    }

    fn claim(more: Value) -> PersistentVolumeClaim {
        let base = json!({"metadata": {"name": "p-v", "namespace": "ns", "uid": "c-1"}, "spec": {"volumeName": "pv"},
            "status": {"phase": "Bound"}});
        serde_json::from_value(merged(base, more)).expect("a claim")
    }

    fn pod() -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u-1"}})).expect("a pod")
    }

    #[test]
    fn claims_that_can_be_used() {
        let owner = |uid: &str| {
            json!({"metadata": {"ownerReferences":
                [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid, "controller": true}]}})
        };
        let mut no_controller = owner("u-1");
        no_controller["metadata"]["ownerReferences"][0]["controller"] = json!(false);
        let deleted = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
        let protected = merged(deleted.clone(), json!({"metadata": {"finalizers": ["kubernetes.io/pvc-protection"]}}));
        let not_owned = "PVC ns/p-v was not created for pod ns/p (pod is not owner)";
        for (more, is_ephemeral, expected) in [
            (json!({}), false, Ok("pv")),
            (deleted, false, Err("PVC is being deleted")),
            (protected, false, Ok("pv")),
            (json!({"status": {"phase": "Pending"}}), false, Err("PVC is not bound")),
            (json!({"status": null}), false, Err("PVC is not bound")),
            (json!({"spec": {"volumeName": ""}}), false, Err("PVC has empty pvc.Spec.VolumeName")),
            (json!({}), true, Err(not_owned)),
            (owner("u-2"), true, Err(not_owned)),
            (owner("u-1"), true, Ok("pv")),
            (no_controller, true, Err(not_owned)),
        ] {
            let wanted = ClaimSource { claim: "p-v".to_owned(), is_ephemeral, read_only: false };
            let claim = claim(more);
            let found = volume_of(&claim, &wanted, &pod()).map_err(|problem| problem.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{claim:?}");
        }
    }

    #[test]
    fn problems_that_name_their_object_are_reported_without_the_claim() {
        let text = |problem| ClaimError { namespace: "ns".to_owned(), claim: "c".to_owned(), problem }.to_string();
        assert_eq!(text(ClaimProblem::NotBound), "error processing PVC ns/c: PVC is not bound");
        let not_owned = ClaimProblem::NotOwned { claim: "ns/c".to_owned(), pod: "ns/p".to_owned() };
        assert_eq!(text(not_owned), "PVC ns/c was not created for pod ns/p (pod is not owner)");
        let mode = ClaimProblem::Mode { volume: "v".to_owned(), mode: BLOCK.to_owned(), list: "volumeMounts" };
        assert_eq!(text(mode), "volume v has volumeMode Block, but is specified in volumeMounts");
    }

    #[test]
    fn volumes_that_are_bound_to_the_claim() {
        let volume: Volume = serde_json::from_value(json!({"name": "v"})).expect("a volume");
        let nil = "found PV object pv but it has a nil pv.Spec.ClaimRef indicating it is not yet bound to the claim";
        let other = "found PV object pv but its pv.Spec.ClaimRef.UID c-2 does not point to claim.UID c-1";
        let block = "volume v has volumeMode Block, but is specified in volumeMounts";
        let files = "volume v has volumeMode Filesystem, but is specified in volumeDevices";
        let (mounted, device) = (Uses { mounted: true, as_device: false }, Uses { mounted: false, as_device: true });
        let both = Uses { mounted: true, as_device: true };
        for (spec, uses, expected) in [
            (json!({"claimRef": {"uid": "c-1"}}), mounted, Ok(())),
            (json!({"claimRef": {"uid": "c-1"}, "volumeMode": "Filesystem"}), mounted, Ok(())),
            (json!({}), mounted, Err(nil)),
            (json!({"claimRef": {"uid": "c-2"}}), mounted, Err(other)),
            (json!({"claimRef": {"uid": "c-1"}, "volumeMode": "Block"}), mounted, Err(block)),
            (json!({"claimRef": {"uid": "c-1"}, "volumeMode": "Block"}), device, Ok(())),
            (json!({"claimRef": {"uid": "c-1"}, "volumeMode": "Block"}), both, Err(block)),
            (json!({"claimRef": {"uid": "c-1"}}), device, Err(files)),
            (json!({"claimRef": {"uid": "c-1"}}), both, Err(files)),
        ] {
            let found: PersistentVolume =
                serde_json::from_value(json!({"metadata": {"name": "pv"}, "spec": spec})).expect("a volume");
            let checked = check_volume(&found, &claim(json!({})), &volume, uses).map_err(|problem| problem.to_string());
            assert_eq!(checked, expected.map_err(str::to_owned));
        }
    }

    #[test]
    fn the_claim_of_a_volume() {
        let of = |volume: Value| ClaimSource::of(&pod(), &serde_json::from_value(volume).expect("a volume"));
        assert_eq!(of(json!({"name": "v", "emptyDir": {}})), None);
        let named = of(json!({"name": "v", "persistentVolumeClaim": {"claimName": "c", "readOnly": true}}));
        assert_eq!(named, Some(ClaimSource { claim: "c".to_owned(), is_ephemeral: false, read_only: true }));
        let made = of(json!({"name": "v", "ephemeral": {}}));
        assert_eq!(made, Some(ClaimSource { claim: "p-v".to_owned(), is_ephemeral: true, read_only: false }));
    }
}
