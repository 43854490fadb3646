//! Records of the images that this agent has pulled, and whether a pod may use an image that is on the node without
//! proving to its registry that it may (KEP-2535).
//!
//! An intent is written before a pull and replaced by a record after it, so that an agent that is killed in between still
//! knows that the image was not preloaded. It also stays after a pull that was cancelled, since the runtime may have completed
//! it. Nothing is kept in memory but the pulls that are in progress, those whose outcome is unknown, and the number of files:
//! a check reads one or two small files.
//!
//! ```text
//!  <root>/image_manager/pulling/sha256-<hash of the image's name>   Intent
//!                      /pulled/sha256-<hash of the image's id>      PulledRecord: credentials by name
//! ```

mod files;
mod policy;
mod record;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use tokio::sync::Mutex;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

pub use policy::VerificationPolicy;
pub use record::AccountUse;
pub use record::CredentialSource;
pub use record::SecretUse;

use super::reference::without_tag;
use crate::filesystem;
use crate::metrics::Metrics;
use crate::metrics::MustPull;
use files::Files;
use record::Intent;
use record::PulledRecord;

const SECOND: Duration = Duration::from_secs(1);

/// Pulls by the image's name, which a file exists for.
type Pulling = HashMap<String, Pulls>;

/// Pulls of one image.
#[derive(Clone, Copy, Debug, Default)]
struct Pulls {
    running: u32,
    /// One whose outcome is unknown: a failure of the next one does not reveal it.
    unsettled: Option<Unsettled>,
}

/// A pull that may have brought the image.
#[derive(Clone, Copy, Debug)]
enum Unsettled {
    /// An earlier run has begun it.
    OfEarlierRun,
    /// It was cancelled after the runtime had been asked. Of several, when the first was asked for and the last cancelled.
    Cancelled { asked: Instant, at: Instant },
}

impl Pulls {
    fn end_one(&mut self) {
        self.running = self.running.saturating_sub(1);
    }

    fn cancel_one(&mut self, asked: Instant) {
        self.end_one();
        let at = Instant::now();
        self.unsettled = Some(match self.unsettled {
            Some(Unsettled::OfEarlierRun) => Unsettled::OfEarlierRun,
            Some(Unsettled::Cancelled { asked: before, .. }) => Unsettled::Cancelled { asked: before.min(asked), at },
            None => Unsettled::Cancelled { asked, at },
        });
    }

    /// None of them has brought an image that was there at `seen`.
    fn come_after(&self, seen: Option<Instant>) -> bool {
        let Some(Unsettled::Cancelled { asked, .. }) = self.unsettled else { return false };
        seen.is_some_and(|seen| seen < asked)
    }
}

/// The access records of a node.
#[derive(Debug)]
pub struct AccessRecords {
    files: Files,
    policy: VerificationPolicy,
    metrics: Arc<Metrics>,
    /// Held while files are changed.
    pulling: Arc<Mutex<Pulling>>,
}

/// A hash in upstream's notation.
pub(super) fn lower_hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |text, byte| text + &format!("{byte:02x}"))
}

impl AccessRecords {
    /// Opens the records below the agent's root directory; makes their folders. Blocks.
    ///
    /// # Errors
    /// The folders cannot be made or read.
    pub fn open(root: &Path, policy: VerificationPolicy, metrics: Arc<Metrics>) -> io::Result<Self> {
        let files = Files::open(root)?;
        let unsettled = Pulls { running: 0, unsettled: Some(Unsettled::OfEarlierRun) };
        let intents = files.all::<Intent>()?.into_iter();
        let pulling: Pulling = intents.map(|intent| (intent.image, unsettled)).collect();
        let records = Self { files, policy, metrics, pulling: Arc::new(Mutex::new(pulling)) };
        count(&records.files, &records.metrics);
        Ok(records)
    }

    /// True if a pod may use the image `image_ref`, which is on the node under the name `image`; false if it must be
    /// pulled. `seen`: when it was seen there first. `presented`: the pod's credentials, asked for only if they matter.
    ///
    /// # Errors
    /// Those of `presented`.
    pub async fn may_use<E>(
        &self,
        image: &str,
        image_ref: &str,
        seen: Option<Instant>,
        presented: impl AsyncFnOnce() -> Result<Vec<CredentialSource>, E>,
    ) -> Result<bool, E> {
        let checked = self.check(image, image_ref, seen, presented).await;
        let result = checked.as_ref().map_or(MustPull::Error, |result| *result);
        self.metrics.images.checked(result);
        Ok(matches!(checked?, MustPull::Allowed | MustPull::Recorded))
    }

    async fn check<E>(
        &self,
        image: &str,
        image_ref: &str,
        seen: Option<Instant>,
        presented: impl AsyncFnOnce() -> Result<Vec<CredentialSource>, E>,
    ) -> Result<MustPull, E> {
        let (record, pulled) = match self.read(image, image_ref, seen).await {
            Ok(read) => read,
            Err(error) => {
                tracing::warn!(image, %error, "cannot read which pods may use an image; it is pulled");
                return Ok(MustPull::Error);
            }
        };
        let name = without_tag(image);
        if !self.policy.verifies(name, pulled) {
            return Ok(MustPull::Allowed);
        }
        let access = record.as_ref().and_then(|record| record.credentials.get(name));
        let Some(access) = access.filter(|access| !policy::is_empty(access)) else {
            return Ok(MustPull::Authenticate);
        };
        if policy::is_open(access) {
            return Ok(MustPull::Recorded);
        }
        let presented = presented().await?;
        let Some(proof) = policy::proof(access, &presented) else { return Ok(MustPull::Authenticate) };
        if policy::is_recorded(access) {
            self.record(image, image_ref, proof, false).await;
        }
        Ok(MustPull::Recorded)
    }

    /// The record of an image, and whether this agent has pulled it or tried to.
    async fn read(
        &self,
        image: &str,
        image_ref: &str,
        seen: Option<Instant>,
    ) -> io::Result<(Option<PulledRecord>, bool)> {
        let pulls = self.pulling.lock().await.get(image).copied().unwrap_or_default();
        let (is_pulling, was_there) = (pulls.running > 0, pulls.come_after(seen));
        let (files, image, image_ref) = (self.files.clone(), image.to_owned(), image_ref.to_owned());
        filesystem::blocking(move || {
            let record = files.get::<PulledRecord>(&image_ref)?;
            // A record says enough: an intent that cannot be read must not hide it.
            let pulled = record.is_some() || is_pulling || (files.get::<Intent>(&image)?.is_some() && !was_there);
            Ok((record, pulled))
        })
        .await
    }

    /// A pull begins. To be followed by [`Self::pulled`], [`Self::not_pulled`] or [`Self::cancelled`]. If the future is
    /// dropped, none has begun; a file that it has written stays until the next pull of the image ends.
    ///
    /// # Errors
    /// The intent cannot be written: the image must not be pulled.
    pub async fn begin(&self, image: &str) -> io::Result<()> {
        let intent = Intent::new(image);
        let mut pulling = self.change(self.lock().await, move |files| files.write(&intent)).await?;
        pulling.entry(image.to_owned()).or_default().running += 1;
        Ok(())
    }

    /// The pull has failed. The intent stays if it is not known whether the image of an earlier one has arrived.
    pub async fn not_pulled(&self, image: &str) {
        self.end(image, Pulls::end_one).await;
    }

    /// The pull was cancelled, which the runtime was asked for at `asked` and may have completed. The intent stays until it is
    /// known what became of it.
    pub async fn cancelled(&self, image: &str, asked: Instant) {
        self.end(image, |pulls| pulls.cancel_one(asked)).await;
    }

    /// The pull has succeeded with this credential. The intent stays if the record cannot be written.
    pub async fn pulled(&self, image: &str, image_ref: &str, source: &CredentialSource) {
        if self.record(image, image_ref, source, true).await {
            let ended = |pulls: &mut Pulls| {
                pulls.unsettled = None;
                pulls.end_one();
            };
            self.end(image, ended).await;
        }
    }

    /// Adds a credential to the record of an image, which has just been `pulled` or not. False if it cannot be written.
    async fn record(&self, image: &str, image_ref: &str, source: &CredentialSource, pulled: bool) -> bool {
        let (name, id, source) = (without_tag(image).to_owned(), image_ref.to_owned(), source.clone());
        let written = self.change(self.lock().await, move |files| {
            let mut record = readable(files, &name, &id).unwrap_or_else(|| PulledRecord::new(&id));
            // The time of a pull is recorded even if nothing else changes: garbage collection may have listed the images
            // before it, and removes what is older than its list.
            let changed = record.add(&name, &source) || pulled;
            if changed {
                record.updated(SystemTime::now());
                files.write(&record)?;
            }
            Ok(())
        });
        let written = written.await;
        if let Err(error) = &written {
            tracing::warn!(image, image_ref, %error, "cannot record which pods may use an image");
        }
        written.is_ok()
    }

    /// Changes the pulls of this image. Its intent is removed with the last one.
    async fn end(&self, image: &str, change: impl FnOnce(&mut Pulls)) {
        let mut pulling = self.lock().await;
        if let Some(pulls) = pulling.get_mut(image) {
            change(pulls);
            if pulls.running > 0 || pulls.unsettled.is_some() {
                return;
            }
        }
        pulling.remove(image);
        let key = image.to_owned();
        let removed = self.change(pulling, move |files| files.remove::<Intent>(&key));
        if let Err(error) = removed.await {
            tracing::warn!(image, %error, "cannot remove the record of an intended pull");
        }
    }

    /// Whether [`Self::settle`] is to be called when a pull of this image has failed: an earlier run has begun one. What was
    /// cancelled may go on in the runtime.
    pub async fn is_of_earlier_run(&self, image: &str) -> bool {
        let pulls = self.lock().await.get(image).copied().unwrap_or_default();
        matches!(pulls.unsettled, Some(Unsettled::OfEarlierRun))
    }

    /// The images that [`Self::settle`] is to be called for.
    pub async fn unsettled(&self) -> Vec<String> {
        let pulling = self.lock().await;
        pulling.iter().filter(|(_, pulls)| pulls.unsettled.is_some()).map(|(image, _)| image.clone()).collect()
    }

    /// The images whose pulls were cancelled at least so long ago, and that [`Self::settle`] is to be called for.
    pub async fn cancelled_for(&self, age: Duration) -> Vec<String> {
        let is_old =
            |pulls: &Pulls| matches!(pulls.unsettled, Some(Unsettled::Cancelled { at, .. }) if at.elapsed() >= age);
        let pulling = self.lock().await;
        pulling.iter().filter(|(_, pulls)| is_old(pulls)).map(|(image, _)| image.clone()).collect()
    }

    /// Removes the intent of an image unless it is being pulled, or an outcome is unknown.
    pub async fn remove_settled(&self, image: &str) {
        self.end(image, |_| {}).await;
    }

    /// As [`Self::settle`] with an image that is on the node, where it was seen first at `seen`: if that was before it was
    /// asked for, it was not brought by a pull of this name.
    pub async fn settle_present(&self, image: &str, image_ref: &str, seen: Option<Instant>) {
        let was_there = self.lock().await.get(image).is_some_and(|pulls| pulls.come_after(seen));
        match was_there {
            true => self.end(image, |pulls| pulls.unsettled = None).await,
            false => self.settle(image, Some(image_ref)).await,
        }
    }

    /// What became of a pull that an earlier run has begun, or that was cancelled: an image `image_ref` was pulled by this
    /// agent, with unknown credentials, and gets a record unless it has one. If none is on the node, the intent stays until
    /// the next pull of the name ends, as upstream.
    pub async fn settle(&self, image: &str, image_ref: Option<&str>) {
        let Some(image_ref) = image_ref else {
            if let Some(pulls) = self.lock().await.get_mut(image) {
                pulls.unsettled = None;
            }
            return;
        };
        let (name, id) = (image.to_owned(), image_ref.to_owned());
        let recorded = self.change(self.lock().await, move |files| record_unknown(files, &name, &id));
        if let Err(error) = recorded.await.map(drop) {
            // The intent stays: the image counts as pulled by the agent.
            tracing::warn!(image, image_ref, %error, "cannot record that an image was pulled");
            return;
        }
        self.end(image, |pulls| pulls.unsettled = None).await;
    }

    /// Removes the records of images that are not on the node. `images`: ids of all that are, listed after `since`; later
    /// records stay.
    pub async fn prune(&self, images: HashSet<String>, since: SystemTime) {
        if let Err(error) = self.try_prune(images, since).await {
            tracing::warn!(%error, "cannot remove records of images that are gone");
        }
    }

    async fn try_prune(&self, images: HashSet<String>, since: SystemTime) -> io::Result<()> {
        // Their time is cut to seconds.
        let is_old =
            move |record: &PulledRecord| record.last_updated() + SECOND < since && !images.contains(&record.image_ref);
        let files = self.files.clone();
        // Without the lock, for which pulls and starts of containers wait: there are as many as images.
        let searching = filesystem::blocking(move || {
            let old = files.all::<PulledRecord>()?.into_iter().filter(&is_old);
            let old: Vec<String> = old.map(|record| record.image_ref).collect();
            Ok((old, is_old))
        });
        let (old, is_old) = searching.await?;
        if old.is_empty() {
            return Ok(());
        }
        let removing = self.change(self.lock().await, move |files| {
            for image_ref in old {
                // It may have been pulled again meanwhile.
                let record = files.get::<PulledRecord>(&image_ref).unwrap_or_default();
                if record.is_some_and(|record| is_old(&record)) {
                    files.remove::<PulledRecord>(&image_ref)?;
                }
            }
            Ok(())
        });
        removing.await.map(drop)
    }

    async fn lock(&self) -> OwnedMutexGuard<Pulling> {
        self.pulling.clone().lock_owned().await
    }

    /// Carries out `work`, which changes files. Nothing else changes them before it has ended, even if the future is dropped
    /// meanwhile: the work has the lock, and is carried out then too.
    async fn change(
        &self,
        pulling: OwnedMutexGuard<Pulling>,
        work: impl FnOnce(&Files) -> io::Result<()> + Send + 'static,
    ) -> io::Result<OwnedMutexGuard<Pulling>> {
        let (files, metrics) = (self.files.clone(), self.metrics.clone());
        filesystem::blocking(move || {
            let done = work(&files);
            count(&files, &metrics);
            done.map(|()| pulling)
        })
        .await
    }
}

/// Writes a record without credentials, if the image has none that can be read. Blocks.
fn record_unknown(files: &Files, name: &str, image_ref: &str) -> io::Result<()> {
    if readable(files, name, image_ref).is_some() {
        return Ok(());
    }
    let mut record = PulledRecord::new(image_ref);
    record.updated(SystemTime::now());
    files.write(&record)
}

/// The record of an image that was pulled. One that cannot be read is replaced, as upstream: no pod could use the image
/// without a pull otherwise. Blocks.
fn readable(files: &Files, name: &str, image_ref: &str) -> Option<PulledRecord> {
    files.get(image_ref).unwrap_or_else(|error| {
        tracing::warn!(image = name, image_ref, %error, "replacing an unreadable record of which pods may use an image");
        None
    })
}

/// Updates the metrics of files.
fn count(files: &Files, metrics: &Metrics) {
    metrics.images.set_files(files.count::<Intent>(), files.count::<PulledRecord>());
}
