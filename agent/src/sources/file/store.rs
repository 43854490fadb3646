//! Desired pods of the static pod path, computed from a scan and the previous state. Pure: time is an argument.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::listing::Listing;
use super::listing::Reading;
use super::listing::Stamp;
use crate::model::Pod;

/// How long the pods of a file are kept that was renamed or whose folder was replaced: an editor may replace the file in
/// two steps. Those of a deleted file end at once, see [`Store::forget`].
pub(super) const REMOVAL_DELAY: Duration = Duration::from_millis(50);

/// How long running static pods without a manifest are taken to be of a manifest that the agent cannot use at its start: as
/// long as a file that becomes bad later keeps its pods with the default `fileCheckFrequency`. It begins when all manifests
/// can be read: one that becomes unreadable later keeps its pods, too.
pub(super) const INCOMPLETE_LIMIT: Duration = Duration::from_secs(20);

/// A log record; at most one for each state of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Report {
    /// The path cannot be read.
    Path(String),
    /// The path can be read again.
    PathGood,
    /// A file yields no pods.
    Bad(OsString, String),
    /// A file that yielded no pods now does.
    Good(OsString),
    /// A file sets fields that the Pod type does not have.
    Unknown(OsString, Vec<String>),
    /// A file holds documents after the first one.
    IgnoresDocuments(OsString),
    /// Several files define the same pod (namespace/name): the last file name wins.
    Conflict(String, Vec<OsString>),
}

/// The outcome of a scan.
#[derive(Debug, Default)]
pub(super) struct ListingResult {
    /// The complete set of pods, if it differs from the last one delivered.
    pub set: Option<Vec<Pod>>,
    /// What to log.
    pub reports: Vec<Report>,
    /// Scan again at this time even without an event.
    pub rescan_at: Option<Instant>,
    /// A manifest that cannot be used may define further pods, which run since before the agent was started.
    pub is_incomplete: bool,
}

#[derive(Debug, Default)]
struct ManifestFile {
    stamp: Option<Stamp>,
    pods: Vec<Pod>,
    error: Option<String>,
    /// The error says nothing of what the file holds.
    is_unreadable: bool,
    ignores_documents: bool,
    missing_since: Option<Instant>,
}

impl ManifestFile {
    fn unusable(&self) -> Unusable {
        match (&self.error, self.is_unreadable) {
            (None, _) => Unusable::Nothing,
            (Some(_), false) => Unusable::Content,
            (Some(_), true) => Unusable::Unreadable,
        }
    }
}

/// namespace/name.
type Key = String;

/// State of all manifest files.
#[derive(Debug, Default)]
pub(super) struct Store {
    entries: BTreeMap<OsString, ManifestFile>,
    /// The file that each pod comes from.
    owners: BTreeMap<Key, OsString>,
    conflicts: BTreeMap<Key, Vec<OsString>>,
    path_problem: Option<String>,
    /// The set delivered last.
    given: Option<Vec<Pod>>,
    first: FirstSet,
}

/// A manifest that is being written when the agent starts may define a pod that runs. Until that is known, the set is incomplete.
#[derive(Debug, Default)]
struct FirstSet {
    /// The static pods that run when the agent starts; none once the set was complete.
    running: BTreeSet<Key>,
    /// When the first scan found an incomplete set, or the last one a manifest that cannot be read.
    incomplete_since: Option<Instant>,
}

/// Manifests of which a set lacks the pods.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Unusable {
    Nothing,
    /// Some are being written, or are invalid.
    Content,
    /// Some cannot be read.
    Unreadable,
}

impl FirstSet {
    /// An incomplete set was found, and no complete one since.
    fn is_incomplete(&self) -> bool {
        self.incomplete_since.is_some() && !self.running.is_empty()
    }

    /// When the set is complete at the latest, `None` if it is.
    fn incomplete_until(&mut self, set: &[Pod], unusable: Unusable, now: Instant) -> Option<Instant> {
        let defined: BTreeSet<Key> = set.iter().map(key).collect();
        let since = match unusable {
            Unusable::Unreadable => self.incomplete_since.insert(now),
            Unusable::Nothing | Unusable::Content => self.incomplete_since.get_or_insert(now),
        };
        let end = *since + INCOMPLETE_LIMIT;
        let is_incomplete = unusable != Unusable::Nothing && now < end && !self.running.is_subset(&defined);
        if !is_incomplete {
            self.running.clear();
        }
        is_incomplete.then_some(end)
    }
}

impl Store {
    /// `running`: the static pods that run when the agent starts, as namespace/name.
    pub(super) fn new(running: BTreeSet<String>) -> Self {
        Self { first: FirstSet { running, incomplete_since: None }, ..Self::default() }
    }

    /// Stamps of the files that need not be read again.
    pub(super) fn known(&self) -> HashMap<OsString, Stamp> {
        self.entries.iter().filter_map(|(name, entry)| Some((name.clone(), entry.stamp?))).collect()
    }

    /// Drops the pods of deleted files, so that a file that was made again is a new definition of its pods, as for a kubelet.
    /// Returns the set without them, if it differs from the last one delivered.
    pub(super) fn forget(&mut self, deleted: &BTreeSet<OsString>) -> Option<Vec<Pod>> {
        let given = self.given.as_ref()?;
        let gone: Vec<&Pod> = deleted.iter().filter_map(|name| self.entries.get(name)).flat_map(|e| &e.pods).collect();
        let is_gone = |pod: &Pod| gone.iter().any(|gone| Arc::ptr_eq(gone, pod));
        let kept: Vec<Pod> = given.iter().filter(|pod| !is_gone(pod)).cloned().collect();
        self.entries.retain(|name, _| !deleted.contains(name));
        let changed = kept.len() < given.len();
        changed.then(|| {
            self.given = Some(kept.clone());
            kept
        })
    }

    /// Applies a scan made at `now`. Only `periodic` scans drop the pods of files that stay invalid and resolve conflicts.
    pub(super) fn apply(&mut self, listing: Listing, periodic: bool, now: Instant) -> ListingResult {
        let was_incomplete = self.first.is_incomplete();
        let mut result = ListingResult { is_incomplete: was_incomplete, ..ListingResult::default() };
        let (files, usable) = match listing {
            Listing::Folder(files) => {
                self.path_is(None, &mut result.reports);
                (files, true)
            }
            Listing::Single(reading) => {
                self.path_is(None, &mut result.reports);
                // An invalid single file never removes its pod.
                let usable =
                    !matches!(reading, Reading::Bad(..) | Reading::Unreadable(_)) && self.single_is_good(&reading);
                (BTreeMap::from([(OsString::new(), reading)]), usable)
            }
            Listing::Missing => {
                self.path_is(Some("does not exist".to_owned()), &mut result.reports);
                (BTreeMap::new(), true)
            }
            Listing::Unusable(problem) => {
                self.path_is(Some(problem), &mut result.reports);
                return result;
            }
        };
        let giving_up = periodic && usable;
        let is_any_held = files.values().any(|reading| matches!(reading, Reading::Held));
        result.rescan_at = self.missing(&files, now);
        for (name, reading) in files {
            self.entry(name, reading, giving_up, &mut result.reports);
        }
        if usable {
            let set = self.set(periodic, &mut result.reports);
            let of_entries = self.entries.values().map(ManifestFile::unusable).max().unwrap_or(Unusable::Nothing);
            let of_held = if is_any_held { Unusable::Content } else { Unusable::Nothing };
            let incomplete_until = self.first.incomplete_until(&set, of_entries.max(of_held), now);
            result.is_incomplete = incomplete_until.is_some();
            result.rescan_at = [result.rescan_at, incomplete_until].into_iter().flatten().min();
            let is_completed = was_incomplete && !result.is_incomplete;
            if is_completed || self.given.as_ref().is_none_or(|given| !same(given, &set)) {
                self.given = Some(set.clone());
                result.set = Some(set);
            }
        }
        result
    }

    fn path_is(&mut self, problem: Option<String>, reports: &mut Vec<Report>) {
        if self.path_problem != problem {
            reports.push(problem.clone().map_or(Report::PathGood, Report::Path));
            self.path_problem = problem;
        }
    }

    fn single_is_good(&self, reading: &Reading) -> bool {
        let known_good = self.entries.get(&OsString::new()).is_some_and(|e| e.error.is_none());
        matches!(reading, Reading::Good(..)) || known_good
    }

    /// Drops files that are missing for [`REMOVAL_DELAY`]; returns when to scan for the others.
    fn missing(&mut self, files: &BTreeMap<OsString, Reading>, now: Instant) -> Option<Instant> {
        let mut rescan_at = None;
        self.entries.retain(|name, entry| {
            if files.contains_key(name) {
                entry.missing_since = None;
                return true;
            }
            let gone_at = *entry.missing_since.get_or_insert(now) + REMOVAL_DELAY;
            let lingers = now < gone_at && !entry.pods.is_empty();
            if lingers {
                rescan_at = Some(rescan_at.map_or(gone_at, |at: Instant| at.min(gone_at)));
            }
            lingers
        });
        rescan_at
    }

    fn entry(&mut self, name: OsString, reading: Reading, giving_up: bool, reports: &mut Vec<Report>) {
        match reading {
            Reading::Held => {}
            Reading::Unchanged => {
                if let Some(entry) = self.entries.get_mut(&name).filter(|e| giving_up && e.error.is_some()) {
                    entry.pods.clear();
                }
            }
            Reading::Good(stamp, manifest) => {
                let entry = self.entries.entry(name.clone()).or_default();
                let changed = entry.error.is_some() || !same(&entry.pods, &manifest.pods);
                if entry.error.take().is_some() {
                    reports.push(Report::Good(name.clone()));
                }
                // Also if the pods stay the same: documents may be added to a file that is in use.
                if manifest.ignores_documents && !entry.ignores_documents {
                    reports.push(Report::IgnoresDocuments(name.clone()));
                }
                entry.ignores_documents = manifest.ignores_documents;
                if changed {
                    entry.pods = manifest.pods;
                    if !manifest.unknown_fields.is_empty() {
                        reports.push(Report::Unknown(name, manifest.unknown_fields));
                    }
                }
                entry.stamp = stamp;
            }
            Reading::Bad(stamp, message) => self.bad(name, stamp, message, giving_up, reports).is_unreadable = false,
            Reading::Unreadable(message) => self.bad(name, None, message, false, reports).is_unreadable = true,
        }
    }

    fn bad(
        &mut self,
        name: OsString,
        stamp: Option<Stamp>,
        message: String,
        giving_up: bool,
        reports: &mut Vec<Report>,
    ) -> &mut ManifestFile {
        let entry = self.entries.entry(name.clone()).or_default();
        let same_as_before = entry.error.as_ref() == Some(&message);
        if same_as_before && giving_up {
            entry.pods.clear();
        }
        if !same_as_before {
            reports.push(Report::Bad(name, message.clone()));
        }
        entry.error = Some(message);
        entry.stamp = stamp;
        entry
    }

    /// All pods in the order of their files, each once.
    fn set(&mut self, periodic: bool, reports: &mut Vec<Report>) -> Vec<Pod> {
        let mut definitions: BTreeMap<Key, Vec<&OsString>> = BTreeMap::new();
        for (name, entry) in &self.entries {
            for pod in &entry.pods {
                definitions.entry(key(pod)).or_default().push(name);
            }
        }
        let mut owners = BTreeMap::new();
        let mut conflicts = BTreeMap::new();
        for (key, files) in definitions {
            let incumbent = self.owners.get(&key).filter(|owner| !periodic && files.contains(owner));
            let Some(owner) = incumbent.or(files.last().copied()) else { continue };
            owners.insert(key.clone(), owner.clone());
            if files.len() > 1 {
                conflicts.insert(key, files.into_iter().cloned().collect::<Vec<_>>());
            }
        }
        self.owners = owners;
        if periodic {
            for (key, files) in conflicts.iter().filter(|(key, files)| self.conflicts.get(*key) != Some(files)) {
                reports.push(Report::Conflict(key.clone(), files.clone()));
            }
            self.conflicts = conflicts;
        }
        let owned = |name: &OsString, pod: &Pod| self.owners.get(&key(pod)) == Some(name);
        let pods = self.entries.iter().flat_map(|(name, entry)| entry.pods.iter().filter(move |pod| owned(name, pod)));
        pods.cloned().collect()
    }
}

fn key(pod: &Pod) -> Key {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    format!("{}/{}", part(&pod.metadata.namespace), part(&pod.metadata.name))
}

/// The same pods in the same order.
fn same(a: &[Pod], b: &[Pod]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b) || a == b)
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
