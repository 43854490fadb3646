//! Volumes whose size can be measured, and how.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;

use super::Volumes;
use super::uid_of;
use super::uses::mounted_volumes;
use crate::kernel::usage::MeasuredBy;

/// A volume whose size can be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasurableVolume {
    /// Its name in the pod.
    pub name: String,
    /// Where it is, or its device.
    pub path: PathBuf,
    /// The claim that it belongs to, in the pod's namespace.
    pub claim: Option<String>,
    /// It takes space on the node's disk: upstream's local ephemeral volumes.
    pub is_local: bool,
    /// How its size is measured.
    pub by: MeasuredBy,
    /// The project of its file system that counts its files and no others.
    pub project: Option<u32>,
}

impl Volumes {
    /// The pod's volumes that take space on the node's disk, if they are set up: upstream's local ephemeral volumes.
    pub fn on_disk(&self, pod: &Pod) -> Vec<MeasurableVolume> {
        let mut all = self.measurable(pod);
        all.retain(|volume| volume.is_local);
        all
    }

    /// The pod's volumes whose size can be measured, if they are set up: those that this agent fills, which are walked, and
    /// those that it mounts or maps, whose file system or device reports its size. The content of a `hostPath` is
    /// not the pod's.
    pub fn measurable(&self, pod: &Pod) -> Vec<MeasurableVolume> {
        let is_local = |volume: &Volume| match &volume.empty_dir {
            Some(empty_dir) => empty_dir.medium.as_deref().unwrap_or_default().is_empty(),
            None => volume.config_map.is_some(),
        };
        let one = |volume: &Volume| {
            let plugin = self.plugins.of(volume)?;
            let by = plugin.measured_by(uid_of(pod), volume)?;
            let path = match by {
                MeasuredBy::Walk => plugin.mount_path(&self.dirs, uid_of(pod), volume),
                // The directory of a volume that is not mounted is of another file system.
                _ if !self.actual.is_set_up(uid_of(pod), &plugin.backing(uid_of(pod), volume)) => return None,
                MeasuredBy::FileSystem => plugin.mount_path(&self.dirs, uid_of(pod), volume),
                MeasuredBy::Device => plugin.device(&self.dirs, uid_of(pod), volume),
            };
            let path = path.ok()?;
            let (claim, is_local) = (claim_of(pod, volume), is_local(volume));
            let project = self.quotas.as_ref().and_then(|quotas| quotas.id_of(&path));
            Some(MeasurableVolume { name: volume.name.clone(), path, claim, is_local, by, project })
        };
        mounted_volumes(pod).filter_map(one).collect()
    }
}

/// The claim of a volume; that of a generic ephemeral volume is named after pod and volume.
fn claim_of(pod: &Pod, volume: &Volume) -> Option<String> {
    let named = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.clone());
    let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
    named.or_else(|| volume.ephemeral.as_ref().map(|_| format!("{pod_name}-{}", volume.name)))
}
