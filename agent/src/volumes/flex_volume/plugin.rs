//! FlexVolumes that a pod names itself, and teardown of all.

use std::borrow::Cow;
use std::path::PathBuf;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Volume;

use super::FlexSource;
use super::FlexVolumes;
use super::NAME;
use super::Use;
use crate::kernel::usage::MeasuredBy;
use crate::objects::Objects;
use crate::volumes::PodDirs;
use crate::volumes::VolumeError;
use crate::volumes::plugin::Attributes;
use crate::volumes::plugin::Ready;
use crate::volumes::plugin::Target;
use crate::volumes::plugin::VolumePlugin;
use crate::volumes::teardown::VolumeOnDisk;

/// `kubernetes.io/flexvolume`. Its volumes have the names of their drivers instead.
#[derive(Debug)]
pub(in crate::volumes) struct FlexVolume {
    volumes: FlexVolumes,
    objects: Objects,
}

impl FlexVolume {
    pub(in crate::volumes) fn new(volumes: FlexVolumes, objects: Objects) -> Self {
        Self { volumes, objects }
    }
}

fn driver(volume: &Volume) -> &str {
    volume.flex_volume.as_ref().map(|source| source.driver.as_str()).unwrap_or_default()
}

impl VolumePlugin for FlexVolume {
    fn name(&self) -> &'static str {
        NAME
    }

    fn name_of_directory(&self, directory: &str) -> Option<&'static str> {
        self.volumes.name_of_directory(directory)
    }

    fn supports(&self, volume: &Volume) -> bool {
        volume.flex_volume.is_some()
    }

    fn backing(&self, _uid: &str, volume: &Volume) -> (&'static str, String) {
        (self.volumes.known_name(driver(volume)).unwrap_or(NAME), volume.name.clone())
    }

    /// As upstream, a volume without a driver does not count.
    fn counted_as(&self, _uid: &str, volume: &Volume) -> Option<Cow<'static, str>> {
        self.volumes.known_name(driver(volume)).map(Cow::Borrowed)
    }

    fn attributes(&self) -> Attributes {
        Attributes { fs_group: true, ..Attributes::default() }
    }

    fn mount_path(&self, _dirs: &PodDirs, uid: &str, volume: &Volume) -> Result<PathBuf, VolumeError> {
        self.volumes.mount_path(uid, driver(volume), &volume.name)
    }

    fn is_read_only(&self, _uid: &str, volume: &Volume) -> bool {
        volume.flex_volume.as_ref().is_some_and(|source| source.read_only == Some(true))
    }

    fn measured_by(&self, _uid: &str, volume: &Volume) -> Option<MeasuredBy> {
        self.volumes.measured_by(driver(volume))
    }

    fn is_relabelled(&self, uid: &str, volume: &Volume) -> bool {
        !self.is_read_only(uid, volume) && self.volumes.is_relabelled(driver(volume))
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        Box::pin(async move {
            let source = target.volume.flex_volume.as_ref();
            let source = source.ok_or_else(|| VolumeError::Unsupported { volume: target.volume.name.clone() })?;
            let source = FlexSource::from(source);
            let wanted = Use {
                target,
                volume: &target.volume.name,
                source: &source,
                read_only: source.read_only,
                objects: &self.objects,
            };
            self.volumes.mount(wanted).await.map(|()| Ready::default())
        })
    }

    /// What is mounted for the node is unmounted when no pod has it, see [`FlexVolumes::release`].
    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        Box::pin(self.volumes.unmount(volume))
    }
}
