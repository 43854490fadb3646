//! One record of resources with its file: what is still to be written, how soon, and when a write that failed is tried
//! again.

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::CheckpointError;
use super::checkpoint;
use super::checkpoint::Entries;
use crate::model::Backoff;

/// Pauses between attempts to write a file.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Changes that can wait are written together, this long after the last write began.
pub(super) const COLLECTED: Duration = Duration::from_millis(250);

/// How soon a change is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Urgency {
    /// Together with others: without it the next agent does the same.
    Soon,
    /// Without delay.
    AtOnce,
}

/// What follows a write that has ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing.
    Nothing,
    /// Another one, of what has changed meanwhile.
    Write(Urgency),
    /// Another attempt after this pause.
    Retry(Duration),
}

/// The content that a file is to get, as of one moment.
#[derive(Debug)]
pub(super) struct Content {
    path: PathBuf,
    entries: Entries,
    /// Checksum of what the file has.
    stored: Option<u64>,
    /// Number of the content: those that are taken to be written are counted.
    number: u64,
}

/// A write that has not ended, and may not have begun.
#[derive(Debug)]
pub(super) struct PendingWrite {
    path: PathBuf,
    number: u64,
    ended: watch::Receiver<u64>,
}

impl PendingWrite {
    /// Waits for its end, also if it fails, but not for longer than this.
    pub(super) async fn wait(mut self, longest: Duration) {
        let ended = self.ended.wait_for(|ended| *ended >= self.number);
        if tokio::time::timeout(longest, ended).await.is_err() {
            let file = self.path.display();
            tracing::warn!(%file, "a record of resources is not on the disk after {longest:?}; no longer waiting");
        }
    }
}

impl Content {
    /// Writes it, unless the file has the same. Returns its checksum. Blocks.
    ///
    /// # Errors
    /// It cannot be encoded or written.
    pub(super) fn write(&self) -> io::Result<u64> {
        let (content, checksum) = checkpoint::encode(&self.entries)?;
        if self.stored != Some(checksum) {
            checkpoint::write(&self.path, &content)?;
        }
        Ok(checksum)
    }
}

/// One record and its file.
#[derive(Debug)]
pub(super) struct Records {
    pub(super) entries: Entries,
    /// `None` without a file.
    path: Option<PathBuf>,
    /// Checksum of the content that was last read or written.
    stored: Option<u64>,
    /// What the file lacks.
    pub(super) changed: Option<Urgency>,
    /// A task writes the file.
    pub(super) writing: bool,
    /// When the last write began.
    began: Option<Instant>,
    /// Number of the last content that was taken to be written.
    taken: u64,
    /// Number of the last one that was written.
    pub(super) on_disk: u64,
    /// Number of the last one whose write has ended.
    ended: watch::Sender<u64>,
    /// A task waits to write what is collected.
    pub(super) collecting: bool,
    /// A task waits to write it again.
    pub(super) retrying: bool,
    failing: Backoff,
    /// Why the last write failed.
    problem: Option<String>,
}

impl Default for Records {
    fn default() -> Self {
        Self {
            entries: Entries::new(),
            path: None,
            stored: None,
            changed: None,
            writing: false,
            began: None,
            taken: 0,
            on_disk: 0,
            ended: watch::Sender::new(0),
            collecting: false,
            retrying: false,
            failing: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
            problem: None,
        }
    }
}

impl Records {
    pub(super) fn open(path: PathBuf) -> Result<Self, CheckpointError> {
        let (entries, stored) = checkpoint::read(&path)?;
        Ok(Self { entries, path: Some(path), stored, ..Self::default() })
    }

    /// An entry was changed.
    pub(super) fn mark_changed(&mut self, urgency: Urgency) {
        self.changed = self.changed.max(Some(urgency));
    }

    /// How long changes that can wait are still collected.
    pub(super) fn collected_for(&self) -> Duration {
        let until = self.began.map(|began| began + COLLECTED);
        until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// True if the caller is to write the file: there is one, and no other task writes it.
    pub(super) fn begin_writing(&mut self) -> bool {
        self.path.is_some() && !std::mem::replace(&mut self.writing, true)
    }

    /// Leaves the write that was begun to the task that ends the one that it has to wait for.
    pub(super) fn postpone(&mut self) {
        self.mark_changed(Urgency::AtOnce);
        self.writing = false;
    }

    /// What is to be written now. Short, since others wait for the lock meanwhile.
    pub(super) fn take_content(&mut self) -> Option<Content> {
        let path = self.path.clone()?;
        (self.changed, self.began) = (None, Some(Instant::now()));
        self.taken += 1;
        Some(Content { path, entries: self.entries.clone(), stored: self.stored, number: self.taken })
    }

    /// Number of the first content that has what the entries have now: it may be on the disk, or still to be taken.
    pub(super) fn newest(&self) -> u64 {
        self.taken + u64::from(self.changed.is_some())
    }

    /// The next write that begins, which has what the entries have now; `None` without a file.
    pub(super) fn next_write(&self) -> Option<PendingWrite> {
        let path = self.path.clone()?;
        Some(PendingWrite { path, number: self.taken + 1, ended: self.ended.subscribe() })
    }

    /// The content was written, with this checksum, or could not be.
    pub(super) fn ended(&mut self, content: &Content, written: io::Result<u64>) -> Next {
        self.ended.send_replace(content.number);
        match written {
            Ok(checksum) => {
                self.on_disk = content.number;
                self.written(&content.path, checksum);
                self.writing = self.changed == Some(Urgency::AtOnce);
                self.changed.map_or(Next::Nothing, Next::Write)
            }
            Err(error) => self.failed(&content.path, &error).map_or(Next::Nothing, Next::Retry),
        }
    }

    fn written(&mut self, path: &Path, checksum: u64) {
        self.stored = Some(checksum);
        self.failing.succeeded();
        if self.problem.take().is_some() {
            tracing::info!(file = %path.display(), "the record of resources is stored again");
        }
    }

    /// Returns the pause before the next attempt, unless a task waits for one already.
    fn failed(&mut self, path: &Path, error: &io::Error) -> Option<Duration> {
        self.mark_changed(Urgency::Soon);
        self.writing = false;
        let problem = error.to_string();
        if self.problem.as_ref() != Some(&problem) {
            tracing::error!(file = %path.display(), %error, "cannot store a record of resources; retrying");
            self.problem = Some(problem);
        }
        (!std::mem::replace(&mut self.retrying, true)).then(|| self.failing.failed(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(folder: &Path) -> Records {
        Records::open(folder.join("record")).expect("opened")
    }

    #[test]
    fn what_follows_a_write_is_as_urgent_as_what_changed_meanwhile() {
        let folder = tempfile::tempdir().expect("a folder");
        for (meanwhile, next, writes_on) in [
            (None, Next::Nothing, false),
            (Some(Urgency::Soon), Next::Write(Urgency::Soon), false),
            (Some(Urgency::AtOnce), Next::Write(Urgency::AtOnce), true),
        ] {
            let mut records = opened(folder.path());
            records.mark_changed(Urgency::AtOnce);
            assert!(records.begin_writing() && !records.begin_writing(), "one task writes");
            let content = records.take_content().expect("a file");
            if let Some(urgency) = meanwhile {
                records.mark_changed(urgency);
            }
            assert_eq!((records.ended(&content, Ok(1)), records.writing), (next, writes_on));
        }
    }

    #[test]
    fn a_write_that_failed_is_due_again_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut records = opened(folder.path());
        records.mark_changed(Urgency::AtOnce);
        for next in [Next::Retry(FIRST_PAUSE), Next::Nothing] {
            assert!(records.begin_writing());
            let content = records.take_content().expect("a file");
            assert_eq!(records.ended(&content, Err(io::Error::other("full"))), next);
            assert!(records.changed.is_some(), "it is still to be written");
        }
    }

    #[test]
    fn what_is_written_is_as_of_one_moment() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut records = opened(folder.path());
        records.entries.entry("one".into()).or_default();
        let content = records.take_content().expect("a file");
        records.entries.entry("two".into()).or_default();
        let checksum = content.write().expect("written");
        let (entries, stored) = checkpoint::read(&folder.path().join("record")).expect("valid");
        assert_eq!((entries.len(), stored), (1, Some(checksum)));
    }
}
