//! One record of resources with its file: what is still to be written, and when a write that failed is tried again. Writes
//! nothing itself.

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use super::CheckpointError;
use super::checkpoint;
use super::checkpoint::Entries;
use crate::model::Backoff;

/// Pauses between attempts to write a file.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// One record and its file.
#[derive(Debug)]
pub(super) struct Records {
    pub(super) entries: Entries,
    /// `None` without a file.
    pub(super) path: Option<PathBuf>,
    /// Checksum of the content that was last read or written.
    stored: Option<u64>,
    pub(super) changed: bool,
    /// A task writes the file.
    pub(super) writing: bool,
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
            changed: false,
            writing: false,
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

    /// The content to write, if it is another than the stored one.
    pub(super) fn take_content(&mut self) -> Option<(PathBuf, String, u64)> {
        let path = self.path.clone().filter(|_| std::mem::take(&mut self.changed))?;
        match checkpoint::encode(&self.entries) {
            Ok((content, checksum)) if self.stored != Some(checksum) => Some((path, content, checksum)),
            Ok(_) => None,
            Err(error) => {
                tracing::error!(file = %path.display(), %error, "cannot encode a record of resources");
                None
            }
        }
    }

    /// The content with this checksum was written.
    pub(super) fn written(&mut self, path: &Path, checksum: u64) {
        self.stored = Some(checksum);
        self.failing.succeeded();
        if self.problem.take().is_some() {
            tracing::info!(file = %path.display(), "the record of resources is stored again");
        }
    }

    /// The content could not be written. Returns the pause before the next attempt, unless a task waits for one already.
    pub(super) fn failed(&mut self, path: &Path, error: &io::Error) -> Option<Duration> {
        (self.changed, self.writing) = (true, false);
        let problem = error.to_string();
        if self.problem.as_ref() != Some(&problem) {
            tracing::error!(file = %path.display(), %error, "cannot store a record of resources; it is tried again");
            self.problem = Some(problem);
        }
        (!std::mem::replace(&mut self.retrying, true)).then(|| self.failing.failed(0.0))
    }
}
