//! Expands a local volume or FlexVolume to the capacity of its persistent volume, and says so in the status of the claim
//! (upstream: `expandVolumeDuringMount`, `GenerateExpandInUseVolumeFunc`).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::LocalVolumeSource;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;

use super::bound_volumes::BoundVolume;
use super::bound_volumes::Source;
use super::expansion;
use super::expansion::Expansion;
use super::expansion::Need;
use crate::host_program::Programs;
use crate::objects::ObjectError;
use crate::objects::Objects;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::flex_volume::FlexExpansion;
use crate::volumes::flex_volume::FlexVolumes;
use crate::volumes::plugin::blocking;
use crate::volumes::resize;
use crate::volumes::uid_of;

/// A volume that is mounted, or mapped, for a pod.
#[derive(Debug)]
pub(super) struct ClaimedVolume {
    pub(super) objects: Objects,
    pub(super) recorder: Option<Recorder>,
    pub(super) flex_volumes: FlexVolumes,
    pub(super) pod: Pod,
    /// Name of the claim.
    pub(super) claim: String,
    pub(super) used: Arc<BoundVolume>,
    /// Where its device is mounted for the node, if it is a device with files.
    pub(super) place: PathBuf,
    /// It was just mounted: the pod does not use it yet.
    pub(super) is_new: bool,
}

impl ClaimedVolume {
    /// Expands the volume if its capacity is more than the claim has. To be called under the lock of its place. False if nothing
    /// was to be done.
    ///
    /// # Errors
    /// The file system cannot be expanded; the status of the claim cannot be changed; claim or volume cannot be read, and the pod
    /// does not use it yet.
    pub(super) async fn expand(&self, programs: &dyn Programs) -> Result<bool, VolumeError> {
        let (claim, volume) = match self.read().await {
            Ok(read) => read,
            Err(source) if self.is_new => return Err(VolumeError::ExpandedClaim { what: "get PVC failed ", source }),
            Err(error) => {
                tracing::debug!(claim = self.claim, %error, "cannot read the size of a claim");
                return Ok(false);
            }
        };
        match expansion::need(&claim, &volume, self.used.read_only) {
            Need::Nothing => Ok(false),
            Need::ReadOnly => {
                let message = self.message("failed", "requested read-only file system");
                self.report(&claim, EventType::Warning, "FileSystemResizeFailed", &message);
                Ok(false)
            }
            Need::Expand(expansion) => self.carry_out(claim, &expansion, programs).await.map(|()| true),
        }
    }

    fn namespace(&self) -> &str {
        self.pod.metadata.namespace.as_deref().unwrap_or_default()
    }

    async fn read(&self) -> Result<(PersistentVolumeClaim, PersistentVolume), ObjectError> {
        let claim = self.objects.persistent_volume_claim(self.namespace(), &self.claim).await?;
        Ok((claim, self.objects.persistent_volume(&self.used.name).await?))
    }

    async fn carry_out(
        &self,
        mut claim: PersistentVolumeClaim,
        expansion: &Expansion,
        programs: &dyn Programs,
    ) -> Result<(), VolumeError> {
        // As upstream, at the end of an expansion.
        let what = if expansion.is_recorded { "update pvc status failed" } else { "update PVC status failed " };
        let cannot_update = |source| VolumeError::ExpandedClaim { what, source };
        if let Some(patch) = expansion::begun(&claim).filter(|_| expansion.is_recorded) {
            let patched = self.objects.patch_claim_status(self.namespace(), &self.claim, &patch).await;
            claim = patched.map_err(cannot_update)?;
        }
        if let Err(error) = Box::pin(self.resize(expansion, programs)).await {
            if expansion.is_recorded && !matches!(error, VolumeError::GivenUp) {
                self.record_failure(&claim, expansion, &error).await;
            }
            return Err(error);
        }
        let node = self.pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
        let message = self.message("succeeded", node);
        self.report(&claim, EventType::Normal, "FileSystemResizeSuccessful", &message);
        // If that fails, the file system is found to be large enough the next time.
        let patch = expansion::finished(&claim, expansion);
        let patched = self.objects.patch_claim_status(self.namespace(), &self.claim, &patch).await;
        patched.map(drop).map_err(cannot_update)
    }

    async fn record_failure(&self, claim: &PersistentVolumeClaim, expansion: &Expansion, error: &VolumeError) {
        let patch = expansion::failed(claim, expansion, &error.to_string(), Timestamp::now());
        let Some(patch) = patch else { return };
        if let Err(error) = self.objects.patch_claim_status(self.namespace(), &self.claim, &patch).await {
            tracing::warn!(claim = self.claim, %error, "cannot record that the expansion of a volume has failed");
        }
    }

    /// Expands what is on the volume. A raw device has its own size.
    async fn resize(&self, expansion: &Expansion, programs: &dyn Programs) -> Result<(), VolumeError> {
        if self.used.is_block {
            return Ok(());
        }
        match &self.used.source {
            Source::Local(source) => Box::pin(self.resize_local(source, programs)).await,
            Source::Flex(source) => {
                let wanted = FlexExpansion {
                    uid: uid_of(&self.pod),
                    volume: &self.used.name,
                    source,
                    objects: &self.objects,
                    to: expansion.bytes(),
                    from: expansion.from,
                };
                // Boxed, as the next ones: the calls of a driver are a large future, which others would hold as well.
                Box::pin(self.flex_volumes.expand(wanted)).await
            }
            _ => Ok(()),
        }
    }

    /// As upstream, a directory has the size that its file system has.
    async fn resize_local(&self, source: &LocalVolumeSource, programs: &dyn Programs) -> Result<(), VolumeError> {
        let device = Path::new("/").join(&source.path);
        let path = device.clone();
        let found = blocking(move || Ok(fs::metadata(&path).on("inspect", &path)?.file_type())).await?;
        if found.is_dir() {
            return Ok(());
        }
        match found.is_block_device() {
            true => resize::run(&device, &self.place, programs).await,
            false => Err(VolumeError::LocalPath {
                path: device,
                problem: "only directory and block device are supported".to_owned(),
            }),
        }
    }

    fn message(&self, how: &str, suffix: &str) -> String {
        format!("MountVolume.NodeExpandVolume {how} for volume {:?} {suffix}", self.used.name)
    }

    /// Records an event on the pod and one on the claim.
    fn report(&self, claim: &PersistentVolumeClaim, kind: EventType, reason: &str, message: &str) {
        let Some(recorder) = &self.recorder else { return };
        recorder.pod_event(&self.pod, "", kind, reason, message);
        let claim = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("PersistentVolumeClaim".to_owned()),
            namespace: claim.metadata.namespace.clone(),
            name: claim.metadata.name.clone(),
            uid: claim.metadata.uid.clone(),
            ..ObjectReference::default()
        };
        recorder.event(claim, kind, reason, message, BTreeMap::new());
    }
}
