//! Disks that a pod names itself, and teardown of all.

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Volume;

use super::DiskSource;
use super::Disks;
use super::Kind;
use super::Use;
use crate::kernel::usage::MeasuredBy;
use crate::objects::Objects;
use crate::volumes::VolumeError;
use crate::volumes::plugin::Attributes;
use crate::volumes::plugin::Ready;
use crate::volumes::plugin::Target;
use crate::volumes::plugin::VolumePlugin;
use crate::volumes::plugin::blocking;
use crate::volumes::teardown::VolumeOnDisk;

/// `kubernetes.io/iscsi` or `kubernetes.io/fc`.
#[derive(Debug)]
pub(in crate::volumes) struct DiskVolumes {
    kind: Kind,
    disks: Disks,
    objects: Objects,
}

impl DiskVolumes {
    /// The plugin of one kind of disks.
    pub(in crate::volumes) fn new(kind: Kind, disks: Disks, objects: Objects) -> Self {
        Self { kind, disks, objects }
    }
}

impl VolumePlugin for DiskVolumes {
    fn name(&self) -> &'static str {
        self.kind.plugin()
    }

    fn supports(&self, volume: &Volume) -> bool {
        match self.kind {
            Kind::Iscsi => volume.iscsi.is_some(),
            Kind::Fc => volume.fc.is_some(),
        }
    }

    fn attributes(&self) -> Attributes {
        Attributes { fs_group: true, ..Attributes::default() }
    }

    fn is_read_only(&self, _uid: &str, volume: &Volume) -> bool {
        DiskSource::of_pod(volume).is_some_and(|source| source.is_read_only())
    }

    fn measured_by(&self, _uid: &str, _volume: &Volume) -> Option<MeasuredBy> {
        Some(MeasuredBy::FileSystem)
    }

    fn is_relabelled(&self, uid: &str, volume: &Volume) -> bool {
        !self.is_read_only(uid, volume)
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        Box::pin(async move {
            let source = DiskSource::of_pod(target.volume);
            let source = source.ok_or_else(|| VolumeError::Unsupported { volume: target.volume.name.clone() })?;
            let wanted = Use {
                target,
                volume: &target.volume.name,
                source: &source,
                read_only: source.is_read_only(),
                options: &[],
                objects: &self.objects,
            };
            self.disks.mount(wanted).await.map(|()| Ready::default())
        })
    }

    /// The disk is detached when no pod has it, see [`Disks::release`].
    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        let volume = volume.clone();
        Box::pin(blocking(move || volume.unmount()))
    }
}
