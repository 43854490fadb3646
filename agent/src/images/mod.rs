//! Container images: lookups in the runtime, and pulls within the configured limits. The pull policy is decided by the
//! pod worker. Keeps nothing on disk.
//!
//! Lookups are cached per pod, so that a container restart costs no ImageStatus call. An entry is removed when this agent
//! pulls the image again, when CreateContainer fails, and with its pod; a stale entry is used once more and refreshed
//! afterwards. An image that is retagged by others thus reaches a restarting container one restart later than a new pod;
//! an image that is deleted by others costs one failed CreateContainer.

mod cache;
mod disk;
mod pull;
mod reference;
mod removal;
#[cfg(test)]
mod tests;
mod usage;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;
use tokio::sync::watch;
use tokio::time::Instant;

pub use cache::CachedImage;
pub use disk::check_disk;
pub use pull::PullError;
pub use pull::PullLimits;
pub use reference::ReferenceError;
pub use reference::is_latest;
pub use reference::with_default_tag;
pub use removal::RemovedImages;
pub use usage::ImageUsage;

use crate::model::PodSnapshot;
use crate::runtime::Runtime;
use crate::runtime::RuntimeError;
use cache::ImageCache;
use pull::PullLimiter;
use removal::Seen;

/// The image service of the runtime, with a lookup cache and pull limits.
#[derive(Debug)]
pub struct Images {
    runtime: Runtime,
    limiter: PullLimiter,
    cache: Mutex<ImageCache>,
    seen: Mutex<Seen>,
    changes: watch::Sender<u64>,
}

/// An image as the runtime reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// Id or digest to create containers from.
    pub image_ref: String,
    /// Numeric user, if it names one.
    pub uid: Option<i64>,
    /// User by name, if it names one.
    pub username: String,
    /// Bytes.
    pub size: u64,
}

/// A pulled image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// What its name resolved to.
    pub image_ref: String,
    /// Duration of the pull without waiting for the limit on parallel pulls.
    pub took: Duration,
}

impl Images {
    /// Images of `runtime`, pulled within `limits`.
    pub fn new(runtime: Runtime, limits: PullLimits) -> Self {
        let (cache, seen, changes) = (Mutex::default(), Mutex::default(), watch::Sender::new(0));
        Self { runtime, limiter: PullLimiter::new(limits), cache, seen, changes }
    }

    /// A counter of images pulled and removed by this agent.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// ImageStatus of the image with this name; `None` if it is not on the node. `annotations` are the pod's. May be
    /// cancelled.
    ///
    /// # Errors
    /// The runtime does not answer, or answers with an error.
    pub async fn inspect(
        &self,
        image: &str,
        annotations: Option<&BTreeMap<String, String>>,
    ) -> Result<Option<ImageInfo>, RuntimeError> {
        let found = self.runtime.image_status(spec(image, annotations)).await?;
        Ok(found.map(|image| ImageInfo {
            image_ref: image.id,
            uid: image.uid.map(|uid| uid.value),
            username: image.username,
            size: image.size,
        }))
    }

    /// PullImage for the pod of `sandbox`, once the limit on parallel pulls permits it. Removes the image from the cache.
    /// If cancelled, the runtime may still complete the pull.
    ///
    /// # Errors
    /// `registryPullQPS` is exceeded; the runtime does not answer, or answers with an error.
    pub async fn pull(&self, image: &str, sandbox: cri::PodSandboxConfig) -> Result<Pulled, PullError> {
        let _permit = self.limiter.acquire_permit().await;
        self.limiter.take_token(Instant::now())?;
        let began = Instant::now();
        let spec = spec(image, Some(&sandbox.annotations));
        let result = self.runtime.pull_image(spec, None, Some(sandbox)).await;
        self.cache().remove_image(image);
        if result.is_ok() {
            self.changes.send_modify(|count| *count += 1);
        }
        Ok(Pulled { image_ref: result?, took: began.elapsed() })
    }

    /// Which images of the node are in use by containers of these pods. One ListImages call; may be cancelled.
    ///
    /// # Errors
    /// The runtime does not answer, or answers with an error.
    pub async fn usage(&self, pods: &[Arc<PodSnapshot>]) -> Result<ImageUsage, RuntimeError> {
        let images = self.runtime.list_images(None).await?;
        self.seen().observe(&images, Instant::now());
        Ok(usage::usage(images, pods.iter().flat_map(|pod| &pod.containers)))
    }

    /// The cached lookup of this image for this pod.
    pub fn cached(&self, uid: &str, image: &str, now: Instant) -> Option<CachedImage> {
        self.cache().get(uid, image, now)
    }

    /// Caches a lookup for this pod.
    pub fn set_cached(&self, uid: &str, image: &str, info: ImageInfo, now: Instant) {
        self.cache().insert(uid, image, info, now);
    }

    /// Removes one image of one pod from the cache.
    pub fn remove_cached(&self, uid: &str, image: &str) {
        self.cache().remove(uid, image);
    }

    /// Removes a pod from the cache.
    pub fn remove_cached_pod(&self, uid: &str) {
        self.cache().remove_pod(uid);
    }

    fn cache(&self) -> MutexGuard<'_, ImageCache> {
        // Entries are replaced whole: a panic elsewhere leaves a usable map behind.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn spec(image: &str, annotations: Option<&BTreeMap<String, String>>) -> cri::ImageSpec {
    let annotations = annotations.cloned().unwrap_or_default();
    cri::ImageSpec { image: image.to_owned(), annotations, ..Default::default() }
}
