//! Image volumes (KEP-4639): their images are found or pulled as those of containers, before the first container of a pass
//! starts. One that is not there keeps only the containers from starting that mount it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::VolumeMount;
use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::Cause;
use super::PodError;
use super::image::ImageLookup;
use super::image::ImageRequest;
use crate::images::with_default_tag;
use crate::model::StartFailure;
use crate::volumes::check_sub_path;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::names;

/// Text that a runtime's error begins with if it cannot mount an image (`errors.go` of the CRI).
const NOT_MOUNTED: &str = "ImageVolumeMountFailed";

/// The image volumes of a pod, by name: the runtime's id of the image, or why it is not there.
#[derive(Debug, Default)]
pub(super) struct ImageVolumes(BTreeMap<String, Result<MountedImage, StartFailure>>);

/// An image that is there.
#[derive(Debug)]
struct MountedImage {
    id: String,
    /// As the spec names it.
    reference: String,
}

/// Finds or pulls the images of all image volumes of the pod, unless it is terminated meanwhile: then no container starts
/// that would need them. Events are on the pod.
pub(super) async fn ensure(images: ImageLookup<'_>) -> ImageVolumes {
    let mut all = BTreeMap::new();
    for volume in images.pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        let Some(source) = &volume.image else { continue };
        if images.terminated.is_cancelled() {
            break;
        }
        let reference = source.reference.as_deref().unwrap_or_default();
        // Looked up each time: for a runtime, and what prunes its images, one that is only mounted is unused.
        if let Ok(name) = with_default_tag(reference) {
            images.ctx.images.remove_cached(names::pod_uid(images.pod), &name);
        }
        let wanted =
            ImageRequest { image: reference, policy: source.pull_policy.as_deref(), field_path: String::new() };
        let found = images.ensure(wanted).await.map_err(|error| StartFailure::from(&error));
        let mounted = |id| MountedImage { id, reference: reference.to_owned() };
        all.insert(volume.name.clone(), found.map(|found| mounted(found.image.image_ref)));
    }
    ImageVolumes(all)
}

impl ImageVolumes {
    fn mounts<'a>(
        &'a self,
        spec: &'a ContainerSpec<'_>,
    ) -> impl Iterator<Item = (&'a str, &'a Result<MountedImage, StartFailure>)> {
        let mounts = spec.container.volume_mounts.iter().flatten();
        mounts.filter_map(|mount| Some((mount.name.as_str(), self.0.get(&mount.name)?)))
    }

    /// The container mounts only images that are there. Sends an event for each other one.
    ///
    /// # Errors
    /// The last one that is not there.
    pub(super) fn check(&self, ctx: &ActContext, pod: &Pod, spec: &ContainerSpec<'_>) -> Result<(), PodError> {
        let mut last = Ok(());
        for (volume, found) in self.mounts(spec) {
            if let Err(failure) = found {
                let error = PodError::ImageVolume { volume: volume.to_owned(), failure: failure.clone() };
                ctx.report_start(pod, spec, &error);
                last = Err(error);
            }
        }
        last
    }

    /// The CRI's fields of a mount of an image volume; `None` if the volume is of another kind. `sub_path`: expanded.
    ///
    /// # Errors
    /// The subPath leads out of the image.
    pub(super) fn mount(
        &self,
        mount: &VolumeMount,
        sub_path: Option<&str>,
        sandbox: &cri::PodSandboxConfig,
    ) -> Result<Option<(cri::ImageSpec, String)>, Cause> {
        let Some(Ok(found)) = self.0.get(&mount.name) else { return Ok(None) };
        let sub_path = sub_path.unwrap_or_default();
        check_sub_path(sub_path)?;
        let image = cri::ImageSpec {
            image: found.id.clone(),
            user_specified_image: found.reference.clone(),
            annotations: sandbox.annotations.clone(),
            ..cri::ImageSpec::default()
        };
        Ok(Some((image, sub_path.to_owned())))
    }

    /// Counts the image volumes of a container that was created, or not.
    pub(super) fn count<T>(&self, ctx: &ActContext, spec: &ContainerSpec<'_>, created: &Result<T, PodError>) {
        let mounts = self.mounts(spec).count() as u64;
        let failed = match created {
            Err(PodError::CreateContainer { source, .. }) => source.message().starts_with(NOT_MOUNTED),
            _ => false,
        };
        if mounts > 0 {
            ctx.count(|metrics| metrics.images.volumes_mounted(mounts, !failed));
        }
    }
}
