//! Cache of image lookups by pod. Pure: time is an argument.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::ImageInfo;

/// An entry older than this is to be looked up again after its next use.
const FRESH: Duration = Duration::from_secs(60);

/// A cached image lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedImage {
    /// What the runtime reported.
    pub info: ImageInfo,
    /// The entry is old: look the image up again when there is time.
    pub stale: bool,
}

/// Entries by pod UID and image name, as many as the images of running pods.
#[derive(Debug, Default)]
pub(super) struct ImageCache {
    pods: HashMap<String, HashMap<String, (ImageInfo, Instant)>>,
}

impl ImageCache {
    pub(super) fn get(&self, uid: &str, image: &str, now: Instant) -> Option<CachedImage> {
        let (info, looked_up_at) = self.pods.get(uid)?.get(image)?;
        let stale = now.saturating_duration_since(*looked_up_at) > FRESH;
        Some(CachedImage { info: info.clone(), stale })
    }

    pub(super) fn insert(&mut self, uid: &str, image: &str, info: ImageInfo, now: Instant) {
        self.pods.entry(uid.to_owned()).or_default().insert(image.to_owned(), (info, now));
    }

    pub(super) fn remove(&mut self, uid: &str, image: &str) {
        if let Some(images) = self.pods.get_mut(uid) {
            images.remove(image);
        }
    }

    pub(super) fn remove_image(&mut self, image: &str) {
        for images in self.pods.values_mut() {
            images.remove(image);
        }
    }

    /// Removes all entries of the image with this id.
    pub(super) fn remove_id(&mut self, id: &str) {
        for images in self.pods.values_mut() {
            images.retain(|_, (info, _)| info.image_ref != id);
        }
    }

    pub(super) fn remove_pod(&mut self, uid: &str) {
        self.pods.remove(uid);
    }
}
