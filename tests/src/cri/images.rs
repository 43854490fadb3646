//! The simulated image store and registry.
//!
//! Only image names exist, without layers and content. Error texts are containerd's.

use std::collections::BTreeMap;

use keblet_proto::cri::v1;
use tonic::Status;

/// Stored images and images in the registry.
#[derive(Clone, Debug, Default)]
pub struct Images {
    stored: BTreeMap<String, v1::Image>,
    registry: BTreeMap<String, u64>,
}

impl Images {
    /// Adds an image to the store, as an import does.
    pub fn store(&mut self, name: &str, size: u64) {
        let name = canonical(name);
        self.stored.insert(name.clone(), image(&name, size));
    }

    /// Publishes an image in the registry.
    pub fn publish(&mut self, name: &str, size: u64) {
        self.registry.insert(canonical(name), size);
    }

    /// All stored images, or the one that a filter names.
    pub(super) fn list(&self, filter: Option<&v1::ImageFilter>) -> Vec<v1::Image> {
        let name_filter =
            filter.and_then(|f| f.image.as_ref()).map(|i| i.image.as_str()).filter(|name| !name.is_empty());
        match name_filter {
            Some(name) => self.find(name).cloned().into_iter().collect(),
            None => self.stored.values().cloned().collect(),
        }
    }

    /// By name, id or digest reference.
    pub(super) fn find(&self, reference: &str) -> Option<&v1::Image> {
        let matches = |image: &&v1::Image| image.id == reference || image.repo_digests.iter().any(|d| d == reference);
        self.stored.get(&canonical(reference)).or_else(|| self.stored.values().find(matches))
    }

    /// Resolves the image of a container, as CreateContainer does.
    pub(super) fn resolve(&self, reference: &str) -> Result<&v1::Image, Status> {
        let missing = || Status::not_found(format!("failed to resolve image {reference:?}: not found"));
        self.find(reference).ok_or_else(missing)
    }

    /// Pulls an image from the registry; returns its id.
    pub(super) fn pull(&mut self, reference: &str) -> Result<String, Status> {
        let name = canonical(reference);
        let Some(size) = self.registry.get(&name).copied() else {
            return Err(Status::not_found(format!(
                "failed to pull and unpack image {name:?}: failed to resolve reference {name:?}: {name}: not found"
            )));
        };
        self.store(&name, size);
        Ok(image(&name, size).id)
    }

    /// Removes an image; succeeds if it does not exist.
    pub(super) fn remove(&mut self, reference: &str) {
        if let Some(id) = self.find(reference).map(|image| image.id.clone()) {
            self.stored.retain(|_, image| image.id != id);
        }
    }

    /// Size of all stored images in bytes.
    pub(super) fn used_bytes(&self) -> u64 {
        self.stored.values().map(|image| image.size).sum()
    }
}

fn image(name: &str, size: u64) -> v1::Image {
    let digest = digest(name);
    let repository = name.split('@').next().unwrap_or(name);
    let repository = match repository.rsplit_once(':') {
        Some((head, tag)) if !tag.contains('/') => head,
        _ => repository,
    };
    v1::Image {
        id: digest.clone(),
        repo_tags: vec![name.to_owned()],
        repo_digests: vec![format!("{repository}@{digest}")],
        size,
        uid: Some(v1::Int64Value { value: 0 }),
        ..Default::default()
    }
}

/// Replaces a content digest: the same for the same name, in every run.
fn digest(name: &str) -> String {
    let mut rng = fastrand::Rng::with_seed(
        name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)),
    );
    let words: String = (0..4).map(|_| format!("{:016x}", rng.u64(..))).collect();
    format!("sha256:{words}")
}

/// The reference with registry, namespace and tag.
fn canonical(reference: &str) -> String {
    if reference.starts_with("sha256:") {
        return reference.to_owned();
    }
    let mut name = match reference.split_once('/') {
        Some((registry, _)) if registry.contains(['.', ':']) || registry == "localhost" => reference.to_owned(),
        Some(_) => format!("docker.io/{reference}"),
        None => format!("docker.io/library/{reference}"),
    };
    let last = name.rsplit('/').next().unwrap_or(&name);
    if !last.contains([':', '@']) {
        name.push_str(":latest");
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_references_are_normalised() {
        for (given, expected) in [
            ("busybox", "docker.io/library/busybox:latest"),
            ("busybox:1", "docker.io/library/busybox:1"),
            ("me/app", "docker.io/me/app:latest"),
            ("localhost/app:2", "localhost/app:2"),
            ("reg.example:5000/app", "reg.example:5000/app:latest"),
            ("reg.example/app@sha256:00", "reg.example/app@sha256:00"),
        ] {
            assert_eq!(canonical(given), expected);
        }
    }

    #[test]
    fn stored_image_is_found_by_every_reference() {
        let mut images = Images::default();
        images.store("localhost/app:2", 10);
        let image = images.find("localhost/app:2").cloned().expect("just stored");
        assert_eq!(images.find(&image.id), Some(&image));
        assert_eq!(images.find(&image.repo_digests[0]), Some(&image));
        assert!(image.repo_digests[0].starts_with("localhost/app@sha256:"), "{image:?}");
        images.remove(&image.id);
        assert_eq!(images.list(None), vec![]);
    }

    #[test]
    fn pull_fails_for_an_unpublished_image() {
        let mut images = Images::default();
        let refused = images.pull("nowhere").expect_err("it is not published");
        assert_eq!(refused.code(), tonic::Code::NotFound);
        images.publish("nowhere", 5);
        assert_eq!(images.pull("nowhere").ok(), images.find("nowhere").map(|image| image.id.clone()));
    }
}
