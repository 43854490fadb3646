//! Which images are removed: records of the node's images, and the choice by age and by disk usage. Pure: time is an
//! argument.
//!
//! As the kubelet's `realImageGCManager`: images are removed from the one that was used longest ago; an image that was
//! never seen in use counts as used before all others.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// An image on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Its id.
    pub(crate) id: String,
    /// Bytes.
    pub(crate) size: u64,
    /// A container uses it now.
    pub(crate) in_use: bool,
    /// The runtime, or this agent, never removes it.
    pub(crate) pinned: bool,
}

/// What is known of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Its id.
    pub(crate) id: String,
    /// Bytes.
    pub(crate) size: u64,
    first_detected: Instant,
    last_used: Option<Instant>,
    keep: bool,
    /// Why the runtime did not remove it the last time.
    refused: String,
}

/// All images of the node.
#[derive(Debug, Default)]
pub(crate) struct Records(HashMap<String, Record>);

impl Records {
    /// These are all images of the node, as seen at `now`.
    pub(crate) fn observe(&mut self, images: impl IntoIterator<Item = Found>, now: Instant) {
        let old = std::mem::take(&mut self.0);
        self.0 = images
            .into_iter()
            .map(|Found { id, size, in_use, pinned }| {
                let known = old.get(&id);
                let record = Record {
                    id: id.clone(),
                    size,
                    first_detected: known.map_or(now, |known| known.first_detected),
                    last_used: if in_use { Some(now) } else { known.and_then(|known| known.last_used) },
                    keep: in_use || pinned,
                    refused: known.map(|known| known.refused.clone()).unwrap_or_default(),
                };
                (id, record)
            })
            .collect();
    }

    /// A container is about to be created from an image, or one was found to use it.
    pub(crate) fn used(&mut self, id: &str, now: Instant) {
        if let Some(record) = self.0.get_mut(id) {
            record.last_used = Some(now);
        }
    }

    /// An image was pulled. Its container may be created much later, if it was pulled ahead.
    pub(crate) fn pulled(&mut self, id: &str, now: Instant) {
        let new = || Record {
            id: id.to_owned(),
            size: 0,
            first_detected: now,
            last_used: None,
            keep: false,
            refused: String::new(),
        };
        self.0.entry(id.to_owned()).or_insert_with(new).last_used = Some(now);
    }

    /// When the image was seen first; `None` if it was not yet.
    pub(crate) fn first_detected(&self, id: &str) -> Option<Instant> {
        self.0.get(id).map(|record| record.first_detected)
    }

    /// An image was removed.
    pub(crate) fn removed(&mut self, id: &str) {
        self.0.remove(id);
    }

    /// The runtime did not remove an image. True if the reason is another than the last time.
    pub(crate) fn refused(&mut self, id: &str, reason: &str) -> bool {
        let Some(record) = self.0.get_mut(id) else { return true };
        let is_new = record.refused != reason;
        if is_new {
            reason.clone_into(&mut record.refused);
        }
        is_new
    }

    /// True if the image was used at `moment` or later.
    pub(crate) fn is_used_since(&self, id: &str, moment: Instant) -> bool {
        self.0.get(id).and_then(|record| record.last_used).is_some_and(|used| used >= moment)
    }

    /// Unused images, in order of removal.
    fn candidates(&self) -> Vec<&Record> {
        let mut candidates: Vec<&Record> = self.0.values().filter(|record| !record.keep).collect();
        candidates.sort_by(|a, b| {
            let order = |record: &Record| (record.last_used, record.first_detected);
            order(a).cmp(&order(b)).then_with(|| a.id.cmp(&b.id))
        });
        candidates
    }

    /// Images that were not used for longer than `max_age` (`imageMaximumGCAge`), however new they are.
    pub(crate) fn expired(&self, max_age: Duration, now: Instant) -> Vec<Record> {
        let is_expired =
            |record: &&Record| record.last_used.is_none_or(|used| now.saturating_duration_since(used) > max_age);
        self.candidates().into_iter().filter(is_expired).cloned().collect()
    }

    /// Images that may be removed to free space, in order: not used since the pass began at `begun`, and detected at least
    /// `min_age` ago (`imageMinimumGCAge`), so that an image is not removed between its pull and the creation of its
    /// container.
    pub(crate) fn removable(&self, min_age: Duration, begun: Instant, now: Instant) -> Vec<Record> {
        let may_go = |record: &&Record| {
            record.last_used.is_none_or(|used| used < begun)
                && now.saturating_duration_since(record.first_detected) >= min_age
        };
        self.candidates().into_iter().filter(may_go).cloned().collect()
    }
}

/// Space that is to be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    /// Used percent of the file system.
    pub(crate) usage: u64,
    /// Bytes to free.
    pub(crate) target: u64,
}

/// The space to free on a file system of `capacity` bytes, which is not zero, with `available` bytes; `None` below the
/// `high` threshold. Thresholds are percentages of usage.
pub(crate) fn shortage(capacity: u64, available: u64, high: u64, low: u64) -> Option<Shortage> {
    let available = available.min(capacity);
    let percent_of = |part: u64, whole: u64| u128::from(part) * 100 / u128::from(whole.max(1));
    let usage = 100_u64.saturating_sub(u64::try_from(percent_of(available, capacity)).unwrap_or(100));
    let wanted = u128::from(capacity) * u128::from(100_u64.saturating_sub(low)) / 100;
    let target = u64::try_from(wanted).unwrap_or(u64::MAX).saturating_sub(available);
    (usage >= high).then_some(Shortage { usage, target })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn found(id: &str, size: u64) -> Found {
        Found { id: id.to_owned(), size, in_use: false, pinned: false }
    }

    fn ids(records: Vec<Record>) -> Vec<String> {
        records.into_iter().map(|record| record.id).collect()
    }

    #[test]
    fn the_image_that_was_used_longest_ago_goes_first() {
        let (start, mut records) = (Instant::now(), Records::default());
        let used = |id: &str| Found { in_use: true, ..found(id, 1) };
        records.observe([used("a"), found("never", 1), used("b")], start);
        records.observe([found("a", 1), found("never", 1), used("b"), found("later", 1)], start + MINUTE);
        let all = [found("a", 1), found("never", 1), found("b", 1), found("later", 1)];
        let end = start + 10 * MINUTE;
        records.observe(all.into_iter().chain([Found { pinned: true, ..found("pause", 1) }, used("web")]), end);
        assert_eq!(ids(records.removable(2 * MINUTE, end, end)), ["never", "later", "a", "b"]);
        assert_eq!(ids(records.removable(10 * MINUTE, end, end)), ["never", "a", "b"], "the last one is too new");
        records.used("a", end);
        assert_eq!(ids(records.removable(2 * MINUTE, end, end)), ["never", "later", "b"], "used since the pass began");
        assert!(records.is_used_since("a", end) && !records.is_used_since("b", end));
        records.removed("never");
        assert_eq!(ids(records.removable(2 * MINUTE, end, end)), ["later", "b"]);
    }

    #[test]
    fn age_counts_from_the_last_use() {
        let (start, mut records) = (Instant::now(), Records::default());
        records.observe([Found { in_use: true, ..found("used", 1) }, found("never", 1)], start);
        records.observe([found("used", 1), found("never", 1), found("new", 1)], start + 59 * MINUTE);
        let expired = |now| ids(records.expired(60 * MINUTE, now));
        assert_eq!(expired(start + 60 * MINUTE), ["never", "new"], "never used is older than any age");
        assert_eq!(expired(start + 61 * MINUTE), ["never", "new", "used"]);
    }

    #[test]
    fn an_image_that_was_pulled_counts_as_used_before_it_is_seen() {
        let (start, mut records) = (Instant::now(), Records::default());
        records.pulled("ahead", start);
        records.observe([found("ahead", 1), found("never", 1)], start + MINUTE);
        let expired = |now| ids(records.expired(60 * MINUTE, now));
        assert_eq!(expired(start + 60 * MINUTE), ["never"]);
        assert_eq!(expired(start + 61 * MINUTE), ["never", "ahead"]);
    }

    #[test]
    fn an_image_that_returns_is_new() {
        let (start, mut records) = (Instant::now(), Records::default());
        records.observe([found("a", 1)], start);
        records.observe([], start + MINUTE);
        records.observe([found("a", 1)], start + 2 * MINUTE);
        let now = start + 3 * MINUTE;
        assert!(records.removable(2 * MINUTE, now, now).is_empty());
    }

    #[test]
    fn the_reason_why_an_image_stays_is_new_once() {
        let (start, mut records) = (Instant::now(), Records::default());
        records.observe([found("a", 1), found("b", 1)], start);
        assert!(records.refused("a", "busy") && records.refused("b", "busy"));
        records.observe([found("a", 1), found("b", 1)], start + MINUTE);
        assert!(!records.refused("a", "busy") && records.refused("a", "broken"));
        records.observe([], start + 2 * MINUTE);
        records.observe([found("b", 1)], start + 3 * MINUTE);
        assert!(records.refused("b", "busy"), "it was away");
    }

    #[test]
    fn thresholds_are_percentages_of_usage() {
        let some = |usage, target| Some(Shortage { usage, target });
        for (capacity, available, high, low, expected) in [
            (1000, 50, 90, 80, some(95, 150)),
            (1000, 100, 90, 80, some(90, 100)),
            (1000, 101, 90, 80, some(90, 99)),
            (1000, 110, 90, 80, None),
            (1000, 2000, 1, 0, None),
            (1000, 9, 100, 80, some(100, 191)),
            (1000, 10, 100, 80, None),
            (1000, 500, 0, 0, some(50, 500)),
            (u64::MAX, 0, 85, 80, some(100, 3_689_348_814_741_910_323)),
        ] {
            assert_eq!(shortage(capacity, available, high, low), expected, "{available} of {capacity}, {high}/{low}");
        }
    }
}
