//! Which images containers use, as image garbage collection sees it. Pure.

use std::collections::HashSet;

use keblet_proto::cri::v1 as cri;

/// The images of the node by use.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ImageUsage {
    /// Images of containers in any state, and images that the runtime has pinned (the sandbox image).
    pub(super) in_use: Vec<cri::Image>,
    /// All others: candidates for garbage collection.
    pub(super) unused: Vec<cri::Image>,
    /// Ids of those in use that are pinned and no container was created from.
    pub(super) only_pinned: HashSet<String>,
}

impl ImageUsage {
    /// Divides `images` by whether a container was created from them. Runtimes report a container's image by id or by
    /// digest; tags do not count, because they may have moved since.
    pub(super) fn new<'a>(images: Vec<cri::Image>, of_containers: impl IntoIterator<Item = &'a str>) -> Self {
        let used: HashSet<&str> = of_containers.into_iter().collect();
        let is_used = |image: &cri::Image| {
            used.contains(image.id.as_str()) || image.repo_digests.iter().any(|digest| used.contains(digest.as_str()))
        };
        let only_pinned = images.iter().filter(|image| image.pinned && !is_used(image));
        let only_pinned = only_pinned.map(|image| image.id.clone()).collect();
        let (in_use, unused) = images.into_iter().partition(|image| image.pinned || is_used(image));
        Self { in_use, unused, only_pinned }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_containers_and_pinned_images_are_in_use() {
        let image = |id: &str, digest: &str, tag: &str| cri::Image {
            id: id.into(),
            repo_digests: vec![digest.into()],
            repo_tags: vec![tag.into()],
            ..Default::default()
        };
        let pinned = |image: cri::Image| cri::Image { pinned: true, ..image };
        let images = vec![
            image("sha256:id", "r.example/a@sha256:a", "a:1"),
            image("sha256:2", "r.example/b@sha256:b", "b:1"),
            image("sha256:3", "r.example/c@sha256:c", "c:1"),
            pinned(image("sha256:pause", "p@sha256:p", "pause:1")),
            pinned(image("sha256:both", "d@sha256:d", "d:1")),
        ];
        let ids = |images: Vec<cri::Image>| images.into_iter().map(|image| image.id).collect::<Vec<_>>();
        let usage = ImageUsage::new(images, ["sha256:id", "r.example/b@sha256:b", "c:1", "", "sha256:both"]);
        assert_eq!(ids(usage.in_use), ["sha256:id", "sha256:2", "sha256:pause", "sha256:both"]);
        assert_eq!(usage.only_pinned, ["sha256:pause".to_owned()].into());
        assert_eq!(ids(usage.unused), ["sha256:3"], "a tag alone proves nothing");
    }
}
