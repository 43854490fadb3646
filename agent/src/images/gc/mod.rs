//! Image garbage collection: removes unused images by age, and by the usage of their file system; for the eviction manager
//! also at once. `records` decides, `observe` lists what is in use.
//!
//! ```text
//!  every 5 min ─▶ observe ─▶ records ─▶ expired ──────────▶ remove (age)
//!                              statfs ─▶ shortage ─▶ removable ─▶ remove (space) until enough is freed
//!  eviction ────▶ observe ─▶ records ─────────────▶ removable ─▶ remove (space) all
//! ```
//!
//! Source: `pkg/kubelet/images/image_gc_manager.go`, and `StartGarbageCollection` of the kubelet.

mod error;
mod observe;
pub(super) mod records;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use tokio::sync::Mutex;
use tokio::time::Instant;

pub use error::GcError;

use self::error::with_unit;
use self::observe::Mounted;
use self::records::Record;
use super::Images;
use super::spec;
use crate::kernel::usage::Disk;
use crate::metrics::Metrics;
use crate::model::LoggedReasons;
use crate::model::aggregate;
use crate::model::go_duration;
use crate::recorder::EventType;
use crate::recorder::Recorder;

/// Time from the end of one pass to the next.
const PERIOD: Duration = Duration::from_secs(300);
/// Bytes to free where all unused images are removed, as messages of upstream have it (`math.MaxInt64`).
const ALL: u64 = i64::MAX as u64;
/// What fails in a pass that only observes.
const OBSERVING: &str = "observing";

/// When images are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcPolicy {
    /// `imageGCHighThresholdPercent`: usage of the file system in percent from which images are removed.
    pub high: u64,
    /// `imageGCLowThresholdPercent`: usage at which removal ends.
    pub low: u64,
    /// `imageMinimumGCAge`: images that are on the node for less are not removed for their size.
    pub min_age: Duration,
    /// `imageMaximumGCAge`: images that were not used for longer are removed; zero for no such limit.
    pub max_age: Duration,
}

impl Default for GcPolicy {
    /// Images are not removed periodically.
    fn default() -> Self {
        Self { high: 100, low: 80, min_age: Duration::from_secs(120), max_age: Duration::ZERO }
    }
}

impl GcPolicy {
    /// Nothing is ever removed periodically.
    fn is_off(&self) -> bool {
        self.high >= 100 && self.max_age.is_zero()
    }
}

/// Images that were removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemovedImages {
    /// Number of images.
    pub count: usize,
    /// Their size in bytes.
    pub bytes: u64,
}

/// Why images are removed: upstream's label `reason`.
#[derive(Clone, Copy, Debug)]
enum Reason {
    Age,
    Space,
}

/// Removes unused images. One pass at a time.
pub struct ImageGc {
    images: Arc<Images>,
    policy: GcPolicy,
    recorder: Recorder,
    metrics: Arc<Metrics>,
    /// Locked by the pass that runs: the file system of the images, once the runtime has reported it.
    turn: Mutex<Option<(PathBuf, Disk)>>,
}

/// Result of removing some images.
#[derive(Debug, Default)]
struct Removal {
    removed: RemovedImages,
    errors: Vec<String>,
}

impl ImageGc {
    /// Has observed nothing yet.
    pub fn new(images: Arc<Images>, policy: GcPolicy, recorder: Recorder, metrics: Arc<Metrics>) -> Self {
        Self { images, policy, recorder, metrics, turn: Mutex::default() }
    }

    /// Runs passes until it is dropped: the first one at once, the next five minutes after the end of the last one. Records
    /// event `ImageGCFailed` from the second consecutive failure. If no policy is set, passes only observe, so that the
    /// eviction manager has the age of images.
    pub async fn run(&self) {
        if self.policy.is_off() {
            tracing::info!("unused images are not removed periodically: high threshold 100, no maximum age");
            return self.keep_observing().await;
        }
        // `logged`: the reason of the last failure that was logged as a warning.
        let (started, mut failed, mut logged) = (Instant::now(), false, String::new());
        loop {
            match self.pass(started).await {
                Ok(()) => (failed, logged) = (false, String::new()),
                Err(error) if failed => {
                    let error = error.to_string();
                    self.recorder.node_event(EventType::Warning, "ImageGCFailed", &error);
                    if logged != error {
                        tracing::warn!(error, "image garbage collection has failed again");
                        logged = error;
                    }
                }
                Err(error) => {
                    tracing::info!(%error, "image garbage collection has failed once");
                    failed = true;
                }
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    async fn keep_observing(&self) {
        let mut logged = LoggedReasons::default();
        loop {
            let turn = self.turn.lock().await;
            match self.observe(None).await {
                Ok(()) => logged.succeeded(OBSERVING),
                Err(error) if logged.is_new(OBSERVING, &error.to_string()) => {
                    tracing::warn!(%error, "cannot observe images; trying again");
                }
                Err(error) => tracing::debug!(%error, "cannot observe images again"),
            }
            drop(turn);
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Removes all images that no container uses and that have been on the node for `min_age`. If cancelled, some may have
    /// been removed.
    ///
    /// # Errors
    /// It cannot be determined which images are in use; or some of them could not be removed.
    pub async fn remove_unused(&self, min_age: Duration) -> Result<RemovedImages, GcError> {
        let _turn = self.turn.lock().await;
        let begun = Instant::now();
        self.observe(None).await?;
        let removal = self.remove_for_space(min_age, begun, ALL).await?;
        match removal.errors.is_empty() {
            true => Ok(removal.removed),
            false => Err(space_error(ALL, removal)),
        }
    }

    async fn pass(&self, started: Instant) -> Result<(), GcError> {
        let mut disk = self.turn.lock().await;
        let begun = Instant::now();
        self.observe(None).await?;
        if !self.policy.max_age.is_zero() && begun.duration_since(started) > self.policy.max_age {
            self.remove_expired(begun).await?;
        }
        self.free_space(&mut disk, begun).await
    }

    /// Updates the records; `mounted`: with images that are used otherwise than as the root of a container.
    async fn observe(&self, mounted: Option<&Mounted>) -> Result<(), GcError> {
        let since = SystemTime::now();
        let usage = observe::images(&self.images.runtime).await?;
        if let Some(access) = self.images.access() {
            let ids = usage.in_use.iter().chain(&usage.unused).map(|image| image.id.clone());
            access.prune(ids.collect(), since).await;
            self.images.settle_cancelled().await;
        }
        for (in_use, images) in [(true, &usage.in_use), (false, &usage.unused)] {
            let bytes = images.iter().map(|image| image.size).sum();
            self.metrics.node_images.set(in_use, images.len(), bytes);
        }
        let nothing = Mounted::default();
        let found = observe::found(usage, mounted.unwrap_or(&nothing));
        self.images.records().observe(found, Instant::now());
        Ok(())
    }

    /// Observes again, with everything that may use an image.
    async fn observe_closely(&self) -> Result<(), GcError> {
        let mounted = observe::mounted(&self.images.runtime).await?;
        self.observe(Some(&mounted)).await
    }

    /// All are tried; any error then ends the pass.
    async fn remove_expired(&self, begun: Instant) -> Result<(), GcError> {
        let max_age = self.policy.max_age;
        if self.images.records().expired(max_age, begun).is_empty() {
            return Ok(());
        }
        self.observe_closely().await?;
        let expired = self.images.records().expired(max_age, begun);
        let removal = self.remove(expired, Reason::Age, begun, u64::MAX).await;
        if removal.errors.is_empty() {
            return Ok(());
        }
        Err(GcError::Age { age: go_duration(max_age), errors: aggregate(removal.errors) })
    }

    async fn free_space(&self, disk: &mut Option<(PathBuf, Disk)>, begun: Instant) -> Result<(), GcError> {
        let (capacity, available) = self.measure(disk).await?;
        if capacity == 0 {
            let error = GcError::InvalidCapacity;
            self.recorder.node_event(EventType::Warning, "InvalidDiskCapacity", &error.to_string());
            return Err(error);
        }
        let GcPolicy { high, low, min_age, .. } = self.policy;
        let Some(shortage) = records::shortage(capacity, available, high, low) else { return Ok(()) };
        tracing::info!(usage = shortage.usage, bytes = shortage.target, "freeing space of the image file system");
        let removal = self.remove_for_space(min_age, begun, shortage.target).await?;
        if !removal.errors.is_empty() {
            return Err(space_error(shortage.target, removal));
        }
        if removal.removed.bytes >= shortage.target {
            return Ok(());
        }
        let capacity = with_unit(capacity);
        let error = GcError::NotEnough { usage: shortage.usage, capacity, freed: removal.removed.bytes };
        self.recorder.node_event(EventType::Warning, "FreeDiskSpaceFailed", &error.to_string());
        Err(error)
    }

    /// Capacity and available bytes of the file system that the runtime keeps images on.
    async fn measure(&self, disk: &mut Option<(PathBuf, Disk)>) -> Result<(u64, u64), GcError> {
        let info = self.images.runtime.image_fs_info().await;
        let info = info.map_err(|error| GcError::FileSystem(error.rpc_text()))?;
        let of_images = info.image_filesystems.into_iter().next().ok_or(GcError::NoFileSystem)?;
        let mountpoint = PathBuf::from(of_images.fs_id.map(|id| id.mountpoint).unwrap_or_default());
        if !mountpoint.is_absolute() {
            return Err(GcError::NoFileSystem);
        }
        let known = disk.take().filter(|(path, _)| *path == mountpoint);
        let (path, disk) = disk.insert(known.unwrap_or_else(|| (mountpoint.clone(), Disk::new(mountpoint))));
        let found = disk.measure().await;
        let found = found.ok_or_else(|| GcError::FileSystem(format!("cannot read the size of {}", path.display())))?;
        Ok((found.usage.capacity, found.usage.available))
    }

    async fn remove_for_space(&self, min_age: Duration, begun: Instant, target: u64) -> Result<Removal, GcError> {
        let removable = |now| self.images.records().removable(min_age, begun, now);
        if removable(Instant::now()).is_empty() {
            return Ok(Removal::default());
        }
        self.observe_closely().await?;
        let removable = removable(Instant::now());
        Ok(self.remove(removable, Reason::Space, begun, target).await)
    }

    /// Removes images in this order until `target` bytes are freed. Continues after failures.
    async fn remove(&self, images: Vec<Record>, reason: Reason, begun: Instant, target: u64) -> Removal {
        let mut removal = Removal::default();
        for image in images {
            if removal.removed.bytes >= target {
                break;
            }
            if image.id.is_empty() {
                let message = "ImageID is not valid, skipping, image: ";
                self.recorder.node_event(EventType::Warning, "InvalidImageID", message);
                continue;
            }
            // A worker may have looked the image up since, to create a container from it.
            if self.images.records().is_used_since(&image.id, begun) {
                continue;
            }
            match self.images.runtime.remove_image(spec(&image.id, None)).await {
                Ok(()) => {
                    tracing::info!(image = image.id, bytes = image.size, ?reason, "removed an unused image");
                    self.images.forget(&image.id);
                    self.metrics.node_images.collected(matches!(reason, Reason::Age));
                    removal.removed.count += 1;
                    removal.removed.bytes = removal.removed.bytes.saturating_add(image.size);
                }
                Err(error) => {
                    let reason = error.rpc_text();
                    if self.images.records().refused(&image.id, &reason) {
                        tracing::warn!(image = image.id, reason, "cannot remove an unused image");
                    }
                    removal.errors.push(reason);
                }
            }
        }
        if removal.removed.count > 0 {
            self.images.changes.send_modify(|count| *count += 1);
        }
        removal
    }
}

fn space_error(wanted: u64, removal: Removal) -> GcError {
    GcError::Space { wanted, freed: removal.removed.bytes, errors: aggregate(removal.errors) }
}
