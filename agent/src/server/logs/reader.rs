//! Reads one log in chunks of bounded size. Blocks; called by `follow`.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use tokio::time::Instant;

use super::filter::Filter;
use super::filter::UnknownFormat;
use super::shared::End;
use super::shared::OpenLogs;
use super::shared::SharedLog;
use super::successor::Lines;
use super::successor::successor;
use super::tail;
use crate::model::quote::go_quoted;

/// Bytes per read. Small, because several are buffered for a slow client.
const READ_SIZE: usize = 8 * 1024;
/// The start of a line that is held back until the line is complete, in bytes; of a longer line it is sent at once, and the
/// rest as it is read. Runtimes split lines at 16 KiB.
const MAX_START: usize = 64 * 1024;
/// Longest line in bytes of a format that is parsed as a whole; longer ones are skipped.
const MAX_LINE: usize = 1 << 20;

/// Why a log cannot be read, with upstream's messages.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReadError {
    #[error("failed to try resolving symlinks in path {}: {source}", go_quoted(&.path.to_string_lossy()))]
    Resolve { path: PathBuf, source: io::Error },
    #[error("failed to open log file {}: {source}", go_quoted(&.path.to_string_lossy()))]
    Open { path: PathBuf, source: io::Error },
    #[error("failed to read log file {}: {source}", go_quoted(&.path.to_string_lossy()))]
    Read { path: PathBuf, source: io::Error },
    #[error("failed to get parse function: unsupported log format: {}", go_quoted(&String::from_utf8_lossy(.0)))]
    Format(Vec<u8>),
}

impl From<UnknownFormat> for ReadError {
    fn from(UnknownFormat(line): UnknownFormat) -> Self {
        Self::Format(line)
    }
}

/// The outcome of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadOutcome {
    /// There may be more to read.
    More,
    /// The end of the file was reached.
    End,
    /// A limit was reached: nothing more is sent.
    Done,
}

/// A log being read.
#[derive(Debug)]
pub(super) struct Reader {
    path: PathBuf,
    log: Arc<SharedLog>,
    logs: OpenLogs,
    position: u64,
    /// The beginning of an incomplete line.
    line: Vec<u8>,
    /// Inside a line that is too long to be parsed.
    skipping: bool,
    filter: Filter,
}

impl Reader {
    /// Opens the log at `path`, which may be a symbolic link, at its beginning or at its last `lines`.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(super) fn open(logs: &OpenLogs, path: &Path, lines: Option<u64>, filter: Filter) -> Result<Self, ReadError> {
        let resolved = fs::canonicalize(path).map_err(|source| ReadError::Resolve { path: path.to_owned(), source })?;
        let log = logs.open(&resolved).map_err(|source| ReadError::Open { path: resolved.clone(), source })?;
        let position = match lines {
            Some(lines) => {
                tail::start(&log.file, lines).map_err(|source| ReadError::Read { path: resolved.clone(), source })?
            }
            None => 0,
        };
        Ok(Self { path: resolved, log, logs: logs.clone(), position, line: Vec::new(), skipping: false, filter })
    }

    /// The directory of the log, and of its successor after a rotation.
    pub(super) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Reads a chunk and appends the bytes for the client to `out`.
    ///
    /// # Errors
    /// The file cannot be read, or has an unknown format. The reader cannot be used any more then.
    pub(super) fn step(&mut self, out: &mut Vec<u8>) -> Result<ReadOutcome, ReadError> {
        if self.filter.is_done() {
            return Ok(ReadOutcome::Done);
        }
        let mut buffer = [0; READ_SIZE];
        let read = self.read(&mut buffer)?;
        if read == 0 {
            return Ok(ReadOutcome::End);
        }
        self.take_all(&buffer[..read], out)
    }

    fn read(&self, buffer: &mut [u8]) -> Result<usize, ReadError> {
        let read = self.log.read(buffer, self.position);
        read.map_err(|source| ReadError::Read { path: self.path.clone(), source })
    }

    /// As [`Self::step`] for a follower: shares the result with the other followers. `changes` is the number of changes
    /// of the directory before the read.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn step_for_all(&mut self, changes: Option<u64>, out: &mut Vec<u8>) -> Result<ReadOutcome, ReadError> {
        if self.filter.is_done() {
            return Ok(ReadOutcome::Done);
        }
        let (since, at, mut buffer) = (self.log.generation(), Instant::now(), [0; READ_SIZE]);
        let read = self.read(&mut buffer)?;
        if read > 0 {
            self.log.keep(since, self.position, &buffer[..read]);
            return self.take_all(&buffer[..read], out);
        }
        if self.follow_rotation(out)? {
            return Ok(ReadOutcome::More);
        }
        if let Some(changes) = changes {
            self.log.ended(since, End { position: self.position, changes, at });
        }
        Ok(ReadOutcome::End)
    }

    /// A read from the results of other followers; `None` if there are none, and the file must be read. Does not block.
    /// A result is used if it is from after these `changes` of the directory, and not from before `after`.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn read_shared(
        &mut self,
        changes: Option<u64>,
        after: Instant,
        out: &mut Vec<u8>,
    ) -> Result<Option<ReadOutcome>, ReadError> {
        if self.filter.is_done() {
            return Ok(Some(ReadOutcome::Done));
        }
        if let Some(kept) = self.log.kept(self.position) {
            return self.take_all(&kept, out).map(Some);
        }
        let known = changes.is_some_and(|changes| self.log.is_end(self.position, changes, after));
        Ok(known.then_some(ReadOutcome::End))
    }

    fn take_all(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<ReadOutcome, ReadError> {
        self.position += bytes.len() as u64;
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.take(part, out)?;
        }
        Ok(if self.filter.is_done() { ReadOutcome::Done } else { ReadOutcome::More })
    }

    /// After the end was reached: continues in the new file if the log was rotated, or at the beginning if it was
    /// truncated. Returns whether it was.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn follow_rotation(&mut self, out: &mut Vec<u8>) -> Result<bool, ReadError> {
        if let Ok(there) = fs::metadata(&self.path)
            && (there.dev(), there.ino()) == self.log.id
        {
            let emptied = there.len() < self.position;
            if emptied {
                self.line.clear();
                self.skipping = false;
                self.filter.end_log();
                self.position = 0;
                self.log.forget();
            }
            return Ok(emptied);
        }
        self.continue_in_successor(Lines::MayFollow, out)
    }

    /// After the end was reached: continues in the next file if the log was rotated and is complete. Returns whether it was.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn continue_in_successor(&mut self, lines: Lines, out: &mut Vec<u8>) -> Result<bool, ReadError> {
        let Some(next) = successor(&self.logs, &self.path, &self.log, lines) else { return Ok(false) };
        // Data written between the last read and the rotation.
        while self.step(out)? == ReadOutcome::More {}
        self.flush_last_line(out)?;
        (self.log, self.position) = (next, 0);
        Ok(true)
    }

    /// Processes the last line, which has no newline.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub(super) fn flush_last_line(&mut self, out: &mut Vec<u8>) -> Result<(), ReadError> {
        let line = std::mem::take(&mut self.line);
        self.skipping = false;
        if !line.is_empty() {
            self.filter.take(&line, out)?;
        }
        self.filter.end_log();
        Ok(())
    }

    /// Processes a line or a part of one.
    fn take(&mut self, part: &[u8], out: &mut Vec<u8>) -> Result<(), ReadError> {
        let ends = part.ends_with(b"\n");
        if self.skipping {
            self.skipping = !ends;
        } else if self.filter.is_inside_line() {
            self.filter.take_rest(part, out);
        } else if !ends {
            self.line.extend_from_slice(part);
            self.bound_line(out);
        } else if self.line.is_empty() {
            self.filter.take(part, out)?;
        } else {
            self.line.extend_from_slice(part);
            let line = std::mem::take(&mut self.line);
            self.filter.take(&line, out)?;
        }
        Ok(())
    }

    /// Keeps the start of an incomplete line no longer than memory allows.
    fn bound_line(&mut self, out: &mut Vec<u8>) {
        if self.line.len() > MAX_START && self.filter.take_start(&self.line, out) {
            self.line = Vec::new();
        } else if self.line.len() > MAX_LINE {
            tracing::warn!(log = %self.path.display(), "skipping a log line of more than {MAX_LINE} bytes");
            self.line = Vec::new();
            self.skipping = true;
        }
    }
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
