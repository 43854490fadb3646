//! Images for pods: what the runtime has, and pulling what it has not, within the configured limits.
//!
//! Refuses policy (when to look, when to pull, what to tell the user): that is the runner's. Keeps nothing on disk.
//!
//! What the runtime said of an image is remembered per pod, so that a container's restart asks nothing: the entry is
//! dropped when this agent pulls that image again, when a container cannot be created from it, and with its pod; one
//! that is old is used once more and looked up again afterwards. So an image that somebody else tags anew reaches a
//! restarting container one restart later than it would reach a new pod; an image that somebody deletes costs one failed
//! CreateContainer.

mod disk;
mod pull;
mod reference;
mod remembered;
#[cfg(test)]
mod tests;

use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;
use tokio::sync::watch;
use tokio::time::Instant;

pub use disk::check_disk;
pub use pull::PullError;
pub use pull::PullLimits;
pub use reference::ReferenceError;
pub use reference::is_latest;
pub use reference::with_default_tag;
pub use remembered::Remembered;

use pull::Puller;
use remembered::Memory;

use crate::runtime::Runtime;
use crate::runtime::RuntimeError;

/// The images of this node.
#[derive(Debug)]
pub struct Images {
    runtime: Runtime,
    puller: Puller,
    memory: Mutex<Memory>,
    changes: watch::Sender<u64>,
}

/// What the runtime says of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFacts {
    /// Id or digest to create containers from.
    pub image_ref: String,
    /// Numeric user, if it names one.
    pub uid: Option<i64>,
    /// User by name, if it names one.
    pub username: String,
    /// Bytes.
    pub size: u64,
}

/// An image that was brought to the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// What its name resolved to.
    pub image_ref: String,
    /// How long that took, from when its turn had come.
    pub took: Duration,
}

impl Images {
    /// Images behind `runtime`, pulled within `limits`.
    pub fn new(runtime: Runtime, limits: PullLimits) -> Self {
        Self { runtime, puller: Puller::new(limits), memory: Mutex::default(), changes: watch::Sender::new(0) }
    }

    /// Grows with every image that this agent brought to the node.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// What the runtime has under this name.
    ///
    /// # Errors
    /// The runtime does not answer or refuses.
    pub async fn inspect(&self, image: &str) -> Result<Option<ImageFacts>, RuntimeError> {
        let found = self.runtime.image_status(spec(image)).await?;
        Ok(found.map(|image| ImageFacts {
            image_ref: image.id,
            uid: image.uid.map(|uid| uid.value),
            username: image.username,
            size: image.size,
        }))
    }

    /// Pulls an image, when its turn has come, and tells what came of it. What pods remember of it is
    /// forgotten.
    ///
    /// # Errors
    /// The rate limit is used up; the runtime refuses.
    pub async fn pull(&self, image: &str, sandbox: cri::PodSandboxConfig) -> Result<Pulled, PullError> {
        let _turn = self.puller.turn().await;
        self.puller.take_token(Instant::now())?;
        let began = Instant::now();
        let result = self.runtime.pull_image(spec(image), None, Some(sandbox)).await;
        self.memory().forget_image(image);
        if result.is_ok() {
            self.changes.send_modify(|count| *count += 1);
        }
        Ok(Pulled { image_ref: result?, took: began.elapsed() })
    }

    /// What the pod's last start learned about this image.
    pub fn recall(&self, uid: &str, image: &str, now: Instant) -> Option<Remembered> {
        self.memory().recall(uid, image, now)
    }

    /// Remembers an image for the pod's next start.
    pub fn remember(&self, uid: &str, image: &str, facts: ImageFacts, now: Instant) {
        self.memory().remember(uid, image, facts, now);
    }

    /// Forgets one image of one pod.
    pub fn forget(&self, uid: &str, image: &str) {
        self.memory().forget(uid, image);
    }

    /// Forgets everything about a pod.
    pub fn forget_pod(&self, uid: &str) {
        self.memory().forget_pod(uid);
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        // A panic elsewhere leaves a usable map behind.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn spec(image: &str) -> cri::ImageSpec {
    cri::ImageSpec { image: image.to_owned(), ..Default::default() }
}
