//! Usage of volumes that belong to a PersistentVolumeClaim, for `kubelet_volume_stats_*`.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;

use super::VolumeAt;
use super::extras;
use super::walks::Sizes;
use crate::kernel::usage::DiskUsage;
use crate::model::PodSnapshot;
use crate::model::PodUid;

/// A claim whose volume is set up on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimUsage {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The file system of the volume; used bytes and inodes are those of the volume.
    pub usage: DiskUsage,
}

/// One for each claim: that of the first pod that uses it. Blocks.
pub(super) fn measure(
    snapshots: &[Arc<PodSnapshot>],
    mut volumes: HashMap<PodUid, Vec<VolumeAt>>,
    sizes: &Sizes,
) -> Vec<ClaimUsage> {
    let mut seen = HashSet::new();
    let mut claims = Vec::new();
    for snapshot in snapshots {
        let Some((of_pod, sizes)) = volumes.remove(&snapshot.pod.uid).zip(sizes.get(&snapshot.pod.uid)) else {
            continue;
        };
        for volume in extras::volumes_of(of_pod, sizes) {
            let Some(name) = volume.claim else { continue };
            let namespace = snapshot.pod.namespace.to_string();
            if seen.insert((namespace.clone(), name.clone())) {
                let usage = DiskUsage { used: volume.used.bytes, inodes_used: volume.used.inodes, ..volume.disk };
                claims.push(ClaimUsage { namespace, name, usage });
            }
        }
    }
    claims
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing;
    use crate::stats::Used;

    #[test]
    fn a_claim_of_two_pods_is_reported_once() {
        let dir = tempfile::tempdir().unwrap();
        let pod = |uid: &str| {
            let mut snapshot = testing::snapshot(vec![testing::running("main", 0)]);
            snapshot.pod.uid = uid.into();
            Arc::new(snapshot)
        };
        let snapshots = [pod("a"), pod("b"), pod("c")];
        let at = |claim: &str| {
            let claim = Some(claim.to_owned());
            let path = dir.path().to_owned();
            vec![VolumeAt { name: "data".to_owned(), path, claim, is_local: false, project: None }]
        };
        let volumes = [("a".into(), at("shared")), ("b".into(), at("shared")), ("c".into(), at("own"))].into();
        let size = |bytes| vec![("data".to_owned(), Used { bytes, inodes: 1 })];
        let sizes = [("a".into(), size(7)), ("b".into(), size(7)), ("c".into(), size(8))].into();
        let claims = measure(&snapshots, volumes, &sizes);
        let shown: Vec<_> = claims.iter().map(|claim| (claim.name.as_str(), claim.usage.used)).collect();
        assert_eq!(shown, [("shared", 7), ("own", 8)]);
        assert!(claims.iter().all(|claim| claim.usage.capacity > 0 && claim.usage.inodes_used == 1));
    }
}
