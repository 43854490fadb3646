//! Lists the runtime's images and what uses them.

use std::collections::HashSet;

use futures_util::StreamExt as _;
use futures_util::TryStreamExt as _;
use futures_util::stream;
use keblet_proto::cri::v1 as cri;
use serde::Deserialize;

use super::error::GcError;
use super::records::Found;
use crate::images::usage::ImageUsage;
use crate::runtime::Runtime;

/// Statuses of containers that are requested at a time: a full disk waits for all of them.
const AT_ONCE: usize = 8;

/// All images of the node, by whether a container of any state, of this agent or another client, was created from them.
/// A ListImages and a ListContainers call.
pub(super) async fn images(runtime: &Runtime) -> Result<ImageUsage, GcError> {
    // Images first: the image of a container that is created in between is in use, and one pulled in between is not seen.
    let images = runtime.list_images(None).await.map_err(|error| GcError::list(&error))?;
    let containers = containers(runtime).await?;
    let references = containers.iter().flat_map(|container| [&container.image_id, &container.image_ref]);
    Ok(ImageUsage::new(images, references.map(String::as_str).filter(|reference| !reference.is_empty())))
}

async fn containers(runtime: &Runtime) -> Result<Vec<cri::Container>, GcError> {
    runtime.list_containers(cri::ContainerFilter::default()).await.map_err(|error| GcError::list(&error))
}

/// As records see them.
pub(super) fn found(usage: ImageUsage, also_used: &Mounted) -> Vec<Found> {
    let one = |image: cri::Image, in_use: bool| Found {
        in_use: in_use || also_used.images.contains(&image.id),
        pinned: image.pinned || also_used.is_sandbox(&image),
        id: image.id,
        size: image.size,
    };
    // What is only pinned is not used: the records distinguish both.
    let only_pinned = usage.only_pinned;
    let in_use = usage.in_use.into_iter().map(|image| {
        let is_used = !only_pinned.contains(&image.id);
        one(image, is_used)
    });
    in_use.collect::<Vec<_>>().into_iter().chain(usage.unused.into_iter().map(|image| one(image, false))).collect()
}

/// Images that are used otherwise than as the root of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Mounted {
    /// Ids of images that containers have mounted.
    images: HashSet<String>,
    /// The reference that the runtime makes sandboxes from, if it reports one.
    sandbox: Option<String>,
}

impl Mounted {
    fn is_sandbox(&self, image: &cri::Image) -> bool {
        let Some(sandbox) = &self.sandbox else { return false };
        image.id == *sandbox || image.repo_tags.contains(sandbox) || image.repo_digests.contains(sandbox)
    }
}

/// Requests the status of every container, and the runtime's configuration: only when an image is about to be removed.
pub(super) async fn mounted(runtime: &Runtime) -> Result<Mounted, GcError> {
    let containers = containers(runtime).await?;
    let mounted = stream::iter(containers).map(|container| mounted_by(runtime.clone(), container.id));
    let mounted: Vec<Vec<String>> = mounted.buffer_unordered(AT_ONCE).try_collect().await?;
    let images = mounted.into_iter().flatten().collect();
    let sandbox = match runtime.status(true).await {
        Ok(status) => status.info.get("config").and_then(|config| sandbox_image(config)),
        Err(error) => return Err(GcError::Status(error.rpc_text())),
    };
    Ok(Mounted { images, sandbox })
}

/// Ids of the images that a container has mounted.
async fn mounted_by(runtime: Runtime, container: String) -> Result<Vec<String>, GcError> {
    match runtime.container_status(&container, false).await {
        Ok(inspection) => {
            Ok(inspection.status.mounts.into_iter().filter_map(|mount| Some(mount.image?.image)).collect())
        }
        // It was removed since the list: it uses nothing any more.
        Err(error) if error.is_not_found() => Ok(Vec::new()),
        Err(error) => Err(GcError::Status(error.rpc_text())),
    }
}

/// The image of sandboxes in containerd's configuration before version 2, as a verbose Status returns it. Later versions,
/// and CRI-O, pin the image instead.
fn sandbox_image(config: &str) -> Option<String> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(rename = "sandboxImage")]
        sandbox_image: Option<String>,
    }
    let config: Config = serde_json::from_str(config).ok()?;
    config.sandbox_image.filter(|image| !image.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(id: &str, tag: &str, pinned: bool) -> cri::Image {
        cri::Image { id: id.into(), repo_tags: vec![tag.into()], pinned, ..Default::default() }
    }

    #[test]
    fn mounted_images_are_in_use_and_the_sandbox_image_is_pinned() {
        let all = [image("web", "web:1", false), image("data", "data:1", false), image("old", "pause:3", false)];
        let pinned = [image("pinned", "p:1", true), image("both", "b:1", true)];
        let usage = ImageUsage::new(all.into_iter().chain(pinned).collect(), ["web", "both"]);
        let mounted = Mounted { images: ["data".to_owned()].into(), sandbox: Some("pause:3".to_owned()) };
        let mut shown: Vec<_> =
            found(usage, &mounted).into_iter().map(|found| (found.id, found.in_use, found.pinned)).collect();
        shown.sort();
        let expected = [
            ("both", true, true),
            ("data", true, false),
            ("old", false, true),
            ("pinned", false, true),
            ("web", true, false),
        ];
        assert_eq!(shown, expected.map(|(id, in_use, pinned)| (id.to_owned(), in_use, pinned)));
    }

    #[test]
    fn the_sandbox_image_of_the_runtime() {
        let config = r#"{"containerd": {}, "sandboxImage": "registry.k8s.io/pause:3.8", "statsCollectPeriod": 10}"#;
        assert_eq!(sandbox_image(config).as_deref(), Some("registry.k8s.io/pause:3.8"));
        for none in ["{}", r#"{"sandboxImage": ""}"#, "no json", r#"{"sandboxImage": 7}"#] {
            assert_eq!(sandbox_image(none), None, "{none}");
        }
    }
}
