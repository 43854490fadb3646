//! Evictions that are not finished, in the file `evictions.json`: an agent that is killed in between finishes them
//! after its restart, and the pods' statuses have the reason. Entries that no longer say anything about their pod are ignored.

use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;
use serde::Serialize;

use crate::model::PodUid;

const NAME: &str = "evictions.json";
/// How long after its decision an agent may create containers of the pod, in nanoseconds.
const LATE_STARTS: i64 = 30_000_000_000;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// An eviction that was decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EvictionRecord {
    /// The pod.
    pub(super) uid: String,
    /// Seconds that it gets to end.
    pub(super) grace: i64,
    /// For its status.
    pub(super) message: String,
    /// The pod is not at fault: its status gets the condition `DisruptionTarget`.
    pub(super) disruption: bool,
    /// When it was decided, in nanoseconds since the Unix epoch.
    #[serde(default)]
    pub(super) decided_at: i64,
    /// The boot of the machine in which it was decided.
    #[serde(default)]
    pub(super) boot_id: String,
}

impl EvictionRecord {
    /// True if it was decided in this boot, and its pod may still be ending: its grace period and `period` have not passed.
    /// An entry from the future says nothing: the clock was set.
    fn is_current(&self, boot_id: &str, now: i64, period: Duration) -> bool {
        let grace = Duration::from_secs(u64::try_from(self.grace).unwrap_or(0));
        let limit = i64::try_from(grace.saturating_add(period).as_nanos()).unwrap_or(i64::MAX);
        self.boot_id == boot_id && (0..=limit).contains(&now.saturating_sub(self.decided_at))
    }

    /// True if a container of the pod was created after the decision and before this agent was started: another kubelet has
    /// run the pod on. The agent that decided may still have created some for a while, as the pod's worker was starting them.
    /// Creations are in nanoseconds since the Unix epoch, as `started_at`.
    pub(super) fn is_outlived(&self, created: &[i64], started_at: i64) -> bool {
        let since = self.decided_at.saturating_add(LATE_STARTS);
        created.iter().any(|created| (since..started_at).contains(created))
    }
}

/// The file with its entries.
#[derive(Clone, Debug)]
pub struct Journal {
    path: PathBuf,
    entries: Vec<EvictionRecord>,
    /// This boot of the machine; empty if it cannot be read.
    boot_id: String,
}

impl Journal {
    /// Reads the file below the agent's root directory; a missing or invalid one has no entries. Blocks.
    pub fn open(root: &Path) -> Self {
        let path = root.join(NAME);
        let entries = match fs::read(&path).map(|text| serde_json::from_slice(&text)) {
            Ok(Ok(entries)) => entries,
            Ok(Err(error)) => {
                tracing::warn!(file = %path.display(), %error, "unfinished evictions are not known");
                Vec::new()
            }
            Err(_) => Vec::new(),
        };
        let boot_id = fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned();
        Self { path, entries, boot_id }
    }

    /// This boot of the machine.
    pub(super) fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// All entries.
    pub(super) fn entries(&self) -> &[EvictionRecord] {
        &self.entries
    }

    /// Adds an entry, before anything is done to the pod.
    pub(super) async fn add(&mut self, entry: EvictionRecord) {
        self.entries.retain(|known| known.uid != entry.uid);
        self.entries.push(entry);
        self.write().await;
    }

    /// Removes the entry of a pod that has ended.
    pub(super) async fn remove(&mut self, uid: &PodUid) {
        let before = self.entries.len();
        self.entries.retain(|known| known.uid != uid.as_str());
        if self.entries.len() != before {
            self.write().await;
        }
    }

    /// Removes entries of another boot, and those whose grace period and `period` have passed; `now` is in nanoseconds since the
    /// Unix epoch.
    pub(super) async fn forget_stale(&mut self, now: i64, period: Duration) {
        let before = self.entries.len();
        self.entries.retain(|entry| entry.is_current(&self.boot_id, now, period));
        let stale = before - self.entries.len();
        if stale > 0 {
            tracing::info!(stale, "evictions of long ago were not finished: their pods stay");
            self.write().await;
        }
    }

    /// Removes all entries.
    pub(super) async fn clear(&mut self) {
        if !self.entries.is_empty() {
            self.entries.clear();
            self.write().await;
        }
    }

    /// Replaces the file atomically. A disk without space costs the record, not the eviction.
    async fn write(&self) {
        let write = async || -> io::Result<()> {
            let partial = self.path.with_extension("partial");
            tokio::fs::write(&partial, serde_json::to_vec(&self.entries)?).await?;
            tokio::fs::rename(&partial, &self.path).await
        };
        if let Err(error) = write().await {
            tracing::warn!(file = %self.path.display(), %error, "cannot record the evictions that are not finished");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(uid: &str) -> EvictionRecord {
        let (message, boot_id) = ("low".to_owned(), "boot".to_owned());
        EvictionRecord { uid: uid.to_owned(), grace: 1, message, disruption: true, decided_at: 20 * SECOND, boot_id }
    }

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn an_entry_counts_in_its_boot_and_for_a_while() {
        let period = Duration::from_secs(10);
        let current = |boot: &str, second: i64| entry("a").is_current(boot, second * SECOND, period);
        let seconds = [19, 20, 31, 32].map(|second| current("boot", second));
        assert_eq!(seconds, [false, true, true, false], "until its grace period and ten seconds have passed");
        assert!(!current("another", 20));
        let forever = EvictionRecord { grace: i64::MAX, ..entry("a") };
        assert!(forever.is_current("boot", i64::MAX, period));
    }

    #[test]
    fn a_container_that_another_kubelet_has_started_since_ends_an_entry() {
        let outlived = |created: &[i64]| entry("a").is_outlived(created, 90 * SECOND);
        assert!(!outlived(&[]) && !outlived(&[10 * SECOND, 20 * SECOND]), "it ran when the eviction was decided");
        assert!(!outlived(&[10 * SECOND, 49 * SECOND]), "the agent that decided was starting it");
        assert!(outlived(&[10 * SECOND, 50 * SECOND]));
        assert!(!outlived(&[10 * SECOND, 90 * SECOND]), "this agent has started it again");
    }

    #[tokio::test]
    async fn stale_entries_are_removed_from_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let untimed = r#"{"uid": "old", "grace": 1, "message": "low", "disruption": true}"#;
        fs::write(dir.path().join(NAME), format!("[{untimed}]")).unwrap();
        let mut journal = Journal::open(dir.path());
        assert_eq!(journal.entries().len(), 1, "an earlier version has written it");
        let mine = EvictionRecord { boot_id: journal.boot_id().to_owned(), ..entry("mine") };
        journal.add(mine.clone()).await;
        journal.add(entry("of another boot")).await;
        journal.forget_stale(21 * SECOND, Duration::from_secs(10)).await;
        assert_eq!(Journal::open(dir.path()).entries(), [mine]);
    }

    #[tokio::test]
    async fn entries_outlive_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(dir.path());
        assert!(journal.entries().is_empty());
        journal.add(entry("a")).await;
        journal.add(entry("b")).await;
        journal.add(entry("a")).await;
        journal.remove(&"b".into()).await;
        assert_eq!(Journal::open(dir.path()).entries(), [entry("a")]);
        journal.clear().await;
        assert!(Journal::open(dir.path()).entries().is_empty());
        fs::write(dir.path().join(NAME), "{").unwrap();
        assert!(Journal::open(dir.path()).entries().is_empty(), "a broken file");
        let mut nowhere = Journal::open(Path::new("/no/such/folder"));
        nowhere.add(entry("a")).await;
        assert_eq!(nowhere.entries().len(), 1, "what cannot be written counts until the process ends");
    }
}
