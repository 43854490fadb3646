//! What pods' last starts learned about their images. Pure: time comes in.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::ImageFacts;

/// After this an entry is to be looked up again, once it has been used.
const FRESH: Duration = Duration::from_secs(60);

/// A remembered image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// What the runtime said then.
    pub facts: ImageFacts,
    /// It is some time ago: look it up again when there is time.
    pub stale: bool,
}

/// Entries by pod and image; as many as running pods have images.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pods: HashMap<String, HashMap<String, (ImageFacts, Instant)>>,
}

impl Memory {
    pub(super) fn recall(&self, uid: &str, image: &str, now: Instant) -> Option<Remembered> {
        let (facts, learned) = self.pods.get(uid)?.get(image)?;
        Some(Remembered { facts: facts.clone(), stale: now.saturating_duration_since(*learned) > FRESH })
    }

    pub(super) fn remember(&mut self, uid: &str, image: &str, facts: ImageFacts, now: Instant) {
        self.pods.entry(uid.to_owned()).or_default().insert(image.to_owned(), (facts, now));
    }

    pub(super) fn forget(&mut self, uid: &str, image: &str) {
        if let Some(images) = self.pods.get_mut(uid) {
            images.remove(image);
        }
    }

    pub(super) fn forget_image(&mut self, image: &str) {
        for images in self.pods.values_mut() {
            images.remove(image);
        }
    }

    pub(super) fn forget_pod(&mut self, uid: &str) {
        self.pods.remove(uid);
    }
}
