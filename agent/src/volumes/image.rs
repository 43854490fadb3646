//! Image volumes (`volumes[].image`): nothing on the host. The runtime mounts the image, which the worker has pulled.

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Volume;

use super::VolumeError;
use super::plugin::Attributes;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::teardown::VolumeOnDisk;

/// `kubernetes.io/image`.
#[derive(Debug)]
pub(super) struct Image;

impl VolumePlugin for Image {
    fn name(&self) -> &'static str {
        "kubernetes.io/image"
    }

    fn supports(&self, volume: &Volume) -> bool {
        volume.image.is_some()
    }

    fn attributes(&self) -> Attributes {
        Attributes { read_only: true, ..Attributes::default() }
    }

    fn set_up<'a>(&'a self, _target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        Box::pin(async { Ok(Ready::default()) })
    }

    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        let volume = volume.clone();
        Box::pin(blocking(move || volume.remove_if_empty()))
    }
}
