//! Evictions that are not finished, in the file `evictions.json`: an agent that is killed in between finishes them
//! after its restart, and the pods' statuses have the reason.

use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;

use serde::Deserialize;
use serde::Serialize;

use crate::model::PodUid;

const NAME: &str = "evictions.json";

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
}

/// The file with its entries.
#[derive(Clone, Debug)]
pub struct Journal {
    path: PathBuf,
    entries: Vec<EvictionRecord>,
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
        Self { path, entries }
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
        EvictionRecord { uid: uid.to_owned(), grace: 1, message: "low".to_owned(), disruption: true }
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
