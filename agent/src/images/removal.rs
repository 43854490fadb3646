//! Removal of unused images when the disk is full.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;
use tokio::time::Instant;

use super::Images;
use super::spec;
use crate::model::PodSnapshot;
use crate::runtime::RuntimeError;

/// When images were first seen, by id.
#[derive(Debug, Default)]
pub(super) struct Seen(HashMap<String, Instant>);

impl Seen {
    /// These are all images of the node.
    pub(super) fn observe(&mut self, images: &[cri::Image], now: Instant) {
        self.0 = images.iter().map(|image| (image.id.clone(), *self.0.get(&image.id).unwrap_or(&now))).collect();
    }

    fn is_older(&self, image: &cri::Image, age: Duration, now: Instant) -> bool {
        self.0.get(&image.id).is_some_and(|seen| now.saturating_duration_since(*seen) >= age)
    }
}

/// Images that were removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemovedImages {
    /// How many.
    pub count: usize,
    /// Their size in bytes.
    pub bytes: u64,
}

impl Images {
    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        // Replaced whole: a panic elsewhere leaves a usable map behind.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes images that none of these pods uses and that were first seen `min_age` ago, so that an image is not removed
    /// between its pull and the creation of its container. Continues after failures, which are logged.
    ///
    /// # Errors
    /// The images cannot be listed.
    pub async fn remove_unused(
        &self,
        pods: &[Arc<PodSnapshot>],
        min_age: Duration,
    ) -> Result<RemovedImages, RuntimeError> {
        let unused = self.usage(pods).await?.unused;
        let now = Instant::now();
        let mut removed = RemovedImages::default();
        for image in unused {
            if !self.seen().is_older(&image, min_age, now) {
                continue;
            }
            match self.runtime.remove_image(spec(&image.id, None)).await {
                Ok(()) => {
                    removed = RemovedImages { count: removed.count + 1, bytes: removed.bytes + image.size };
                    tracing::info!(image = image.id, bytes = image.size, "removed an unused image");
                }
                Err(error) => tracing::warn!(image = image.id, %error, "cannot remove an unused image"),
            }
        }
        if removed.count > 0 {
            self.changes.send_modify(|count| *count += 1);
        }
        Ok(removed)
    }
}
