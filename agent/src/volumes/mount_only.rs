//! Volumes that are nothing but a mount: undoing the mount leaves their source as it is. Set up for claims (`claims`), or by
//! another kubelet.

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Volume;

use super::VolumeError;
use super::claims;
use super::plugin::Attributes;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::teardown::VolumeOnDisk;

/// A plugin whose volumes are only torn down.
#[derive(Debug)]
pub(super) struct MountOnly(&'static str);

impl MountOnly {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        [claims::LOCAL].into_iter().map(Self)
    }
}

impl VolumePlugin for MountOnly {
    fn name(&self) -> &'static str {
        self.0
    }

    fn supports(&self, _volume: &Volume) -> bool {
        false
    }

    fn attributes(&self) -> Attributes {
        Attributes::default()
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        Box::pin(async move { Err(VolumeError::Unsupported { volume: target.volume.name.clone() }) })
    }

    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        let volume = volume.clone();
        Box::pin(blocking(move || volume.unmount()))
    }
}
