//! Usage of volumes that belong to a PersistentVolumeClaim, for `kubelet_volume_stats_*`.

use std::collections::HashSet;
use std::sync::Arc;

use super::extras::MeasuredVolumes;
use crate::kernel::usage::DiskUsage;
use crate::model::PodSnapshot;

/// A claim whose volume is set up on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimUsage {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The file system of the volume, or its device, of which only the capacity is known.
    pub usage: DiskUsage,
}

/// One for each claim: that of the first pod that uses it. Blocks.
pub(super) fn measure(snapshots: &[Arc<PodSnapshot>], mut volumes: MeasuredVolumes) -> Vec<ClaimUsage> {
    let mut seen = HashSet::new();
    let mut claims = Vec::new();
    for snapshot in snapshots {
        for volume in volumes.take(&snapshot.pod.uid) {
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
    use std::path::PathBuf;

    use super::*;
    use crate::kernel::usage::MeasuredBy;
    use crate::model::testing;
    use crate::volumes::MeasurableVolume;

    #[test]
    fn a_claim_of_two_pods_is_reported_once() {
        let pod = |uid: &str| {
            let mut snapshot = testing::snapshot(vec![testing::running("main", 0)]);
            snapshot.pod.uid = uid.into();
            Arc::new(snapshot)
        };
        let mut elsewhere = (*pod("d")).clone();
        elsewhere.pod.namespace = "elsewhere".into();
        let snapshots = [pod("a"), pod("b"), pod("c"), Arc::new(elsewhere)];
        let at = |path: &str, claim: &str, by| {
            let (name, path, claim) = ("data".to_owned(), PathBuf::from(path), Some(claim.to_owned()));
            vec![MeasurableVolume { name, path, claim, is_local: false, by, project: None }]
        };
        let all = [
            ("a".into(), at("/a", "shared", MeasuredBy::FileSystem)),
            ("b".into(), at("/b", "shared", MeasuredBy::FileSystem)),
            ("c".into(), at("/c", "own", MeasuredBy::Device)),
            ("d".into(), at("/d", "shared", MeasuredBy::FileSystem)),
        ];
        let disk = DiskUsage { capacity: 9, available: 1, used: 7, inodes: 5, inodes_free: 3, inodes_used: 2 };
        let device = DiskUsage { capacity: 8, ..DiskUsage::default() };
        let other = DiskUsage { capacity: 7, ..disk };
        let disks = [("/a".into(), disk), ("/b".into(), disk), ("/c".into(), device), ("/d".into(), other)];
        let volumes = MeasuredVolumes { all: all.into(), disks: disks.into(), ..MeasuredVolumes::default() };
        let claims = measure(&snapshots, volumes);
        let shown: Vec<_> = claims.iter().map(|claim| (claim.name.as_str(), claim.usage)).collect();
        assert_eq!(shown, [("shared", disk), ("own", device), ("shared", other)], "of two namespaces: two claims");
    }
}
