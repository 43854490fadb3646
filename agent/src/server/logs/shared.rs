//! Open logs, shared by all readers, and the last read of each.
//!
//! Followers at the end of a log all read the same bytes: one of them reads the file, and the others use its last chunk
//! and its end-of-file. Each reader filters for itself.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::sync::Weak;

use bytes::Bytes;
use tokio::time::Instant;

use crate::filesystem;

/// Device and inode, since a path may name another file later.
pub(super) type FileId = (u64, u64);

/// The open logs. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct OpenLogs(Arc<Mutex<HashMap<FileId, Weak<SharedLog>>>>);

/// An open log; closed with its last reader.
#[derive(Debug)]
pub(super) struct SharedLog {
    pub(super) file: File,
    pub(super) id: FileId,
    recent: Mutex<Recent>,
    all: OpenLogs,
}

/// The last read of a log.
#[derive(Debug, Default)]
struct Recent {
    /// Incremented when the log was truncated: older reads are invalid then.
    generation: u64,
    start: u64,
    bytes: Bytes,
    end: Option<End>,
}

/// The end of the file was reached at `position`, and the log was not rotated.
#[derive(Clone, Copy, Debug)]
pub(super) struct End {
    pub(super) position: u64,
    /// Changes of the directory before the read.
    pub(super) changes: u64,
    pub(super) at: Instant,
}

/// Identifies the state of a log between truncations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Generation(u64);

impl OpenLogs {
    /// Opens a log, or returns the open one. A container that mounts the directory of logs can put anything in its place.
    ///
    /// # Errors
    /// It cannot be opened, or is no regular file.
    pub(super) fn open(&self, path: &Path) -> io::Result<Arc<SharedLog>> {
        let file = filesystem::open_regular(path)?;
        let meta = file.metadata()?;
        let id = (meta.dev(), meta.ino());
        let mut all = lock(&self.0);
        if let Some(open) = all.get(&id).and_then(Weak::upgrade) {
            return Ok(open);
        }
        let log = Arc::new(SharedLog { file, id, recent: Mutex::default(), all: self.clone() });
        all.insert(id, Arc::downgrade(&log));
        Ok(log)
    }
}

impl SharedLog {
    /// Reads at `position`. Blocks.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read(&self, buffer: &mut [u8], position: u64) -> io::Result<usize> {
        self.file.read_at(buffer, position)
    }

    /// The current generation, to be read before a read for [`Self::keep`].
    pub(super) fn generation(&self) -> Generation {
        Generation(lock(&self.recent).generation)
    }

    /// Keeps a chunk for other followers, if it is the furthest one.
    pub(super) fn keep(&self, since: Generation, start: u64, bytes: &[u8]) {
        let mut recent = lock(&self.recent);
        let end = recent.start + recent.bytes.len() as u64;
        if recent.generation == since.0 && start + bytes.len() as u64 > end {
            (recent.start, recent.bytes) = (start, Bytes::copy_from_slice(bytes));
        }
    }

    /// The bytes at `position`, as far as they are kept.
    pub(super) fn kept(&self, position: u64) -> Option<Bytes> {
        let recent = lock(&self.recent);
        let skip = usize::try_from(position.checked_sub(recent.start)?).ok()?;
        (skip < recent.bytes.len()).then(|| recent.bytes.slice(skip..))
    }

    /// Records that the end was reached.
    pub(super) fn ended(&self, since: Generation, end: End) {
        let mut recent = lock(&self.recent);
        if recent.generation == since.0 {
            recent.end = Some(end);
        }
    }

    /// Whether another follower reached the end at `position`, after these changes and not before `after`.
    pub(super) fn is_end(&self, position: u64, changes: u64, after: Instant) -> bool {
        let known = lock(&self.recent).end;
        known.is_some_and(|end| end.position == position && end.changes >= changes && end.at >= after)
    }

    /// The log was truncated.
    pub(super) fn forget(&self) {
        let mut recent = lock(&self.recent);
        *recent = Recent { generation: recent.generation + 1, ..Recent::default() };
    }
}

impl Drop for SharedLog {
    fn drop(&mut self) {
        let mut all = lock(&self.all.0);
        // It may have been opened again since the last reader was dropped.
        if all.get(&self.id).is_some_and(|open| open.strong_count() == 0) {
            all.remove(&self.id);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_open_once_and_closed_with_its_last_reader() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, "one").unwrap();
        let logs = OpenLogs::default();
        let (first, second) = (logs.open(&path).unwrap(), logs.open(&path).unwrap());
        assert!(Arc::ptr_eq(&first, &second));
        drop(first);
        assert_eq!(lock(&logs.0).len(), 1);
        drop(second);
        assert_eq!(lock(&logs.0).len(), 0);
        std::fs::rename(&path, dir.path().join("1.log")).unwrap();
        std::fs::write(&path, "two").unwrap();
        let (old, new) = (logs.open(&dir.path().join("1.log")).unwrap(), logs.open(&path).unwrap());
        assert_ne!(old.id, new.id, "another file");
    }

    #[test]
    fn the_furthest_chunk_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::fs::write(&path, "").unwrap();
        let log = OpenLogs::default().open(&path).unwrap();
        let since = log.generation();
        log.keep(since, 10, b"abcdef");
        log.keep(since, 2, b"late reader");
        assert_eq!(log.kept(12).as_deref(), Some(&b"cdef"[..]));
        assert_eq!((log.kept(9), log.kept(16)), (None, None));
        let now = Instant::now();
        log.ended(since, End { position: 16, changes: 3, at: now });
        assert!(log.is_end(16, 3, now) && log.is_end(16, 2, now));
        assert!(!log.is_end(16, 4, now), "something changed since");
        assert!(!log.is_end(17, 3, now), "it was somewhere else");
        assert!(!log.is_end(16, 3, now + std::time::Duration::from_millis(1)), "it is too long ago");
        log.forget();
        log.keep(since, 0, b"from before it was emptied");
        log.ended(since, End { position: 16, changes: 3, at: now });
        assert!(log.kept(0).is_none() && !log.is_end(16, 3, now));
    }
}
