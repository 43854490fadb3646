//! The file that follows a rotated log: the first one that was rotated after it, or the log itself. Blocks.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use super::shared::OpenLogs;
use super::shared::SharedLog;
use crate::log_rotation;

/// A rotated log that was not written for this time is complete: when the runtime opens the new file, its last lines may
/// still be on their way to the old one.
const SETTLED: Duration = Duration::from_millis(200);

/// Whether a reader at the end of a rotated log waits for lines that are on their way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lines {
    /// The runtime may still write.
    MayFollow,
    /// The container has exited and all its output is written.
    Complete,
}

/// The successor of `log`, once `log` is complete. `None` if it was not rotated, or the runtime has not written to the new
/// file yet.
///
/// A reader that is two rotations behind finds the file between them; one that is further behind misses what was compressed
/// meanwhile.
pub(super) fn successor(logs: &OpenLogs, path: &Path, log: &SharedLog, lines: Lines) -> Option<Arc<SharedLog>> {
    // Opened before the folder is listed: if it is rotated in between, it is found under its new name.
    let newest = logs.open(path).ok().filter(|newest| newest.id != log.id);
    let old = log.file.metadata().ok()?;
    let later = rotated_later(path, (old.dev(), old.ino()), old.modified().ok()?);
    let next = later.ok().flatten().and_then(|later| logs.open(&later).ok());
    let next = next.filter(|next| next.id != log.id).or(newest)?;
    let is_written = lines == Lines::Complete || next.file.metadata().is_ok_and(|found| found.len() > 0);
    (is_written && is_complete(&old, lines)).then_some(next)
}

/// The oldest file rotated from the log at `path`, not compressed, and last written after `since`.
fn rotated_later(path: &Path, id: (u64, u64), since: SystemTime) -> io::Result<Option<std::path::PathBuf>> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(|name| name.to_str())) else {
        return Ok(None);
    };
    let names = fs::read_dir(folder)?.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let names: Vec<String> = names.filter(|other| other.starts_with(name)).collect();
    let is_later = |path: &std::path::PathBuf| {
        let found = fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file);
        found.is_some_and(|found| {
            (found.dev(), found.ino()) != id && found.modified().is_ok_and(|modified| modified > since)
        })
    };
    Ok(log_rotation::plain_files(name, &names).into_iter().map(|name| folder.join(name)).find(is_later))
}

fn is_complete(log: &fs::Metadata, lines: Lines) -> bool {
    // A time in the future: the clock was set back.
    let age = log.modified().ok().and_then(|modified| modified.elapsed().ok());
    lines == Lines::Complete || age.is_none_or(|age| age >= SETTLED)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const FIRST: &str = "0.log.20260101-000000";
    const SECOND: &str = "0.log.20260101-000100";

    struct Folder(tempfile::TempDir);

    impl Folder {
        /// Files with their content, last written so many seconds ago.
        fn with(files: &[(&str, &str, u64)]) -> Self {
            let folder = Self(tempfile::tempdir().unwrap());
            for (name, content, seconds) in files {
                fs::write(folder.path(name), content).unwrap();
                folder.written(name, *seconds);
            }
            folder
        }

        fn written(&self, name: &str, seconds_ago: u64) {
            let file = File::options().write(true).open(self.path(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(seconds_ago)).unwrap();
        }

        fn path(&self, name: &str) -> std::path::PathBuf {
            self.0.path().join(name)
        }

        /// Name of the file that follows this one.
        fn after(&self, name: &str, lines: Lines) -> Option<String> {
            let logs = OpenLogs::default();
            let log = logs.open(&self.path(name)).unwrap();
            let next = successor(&logs, &self.path("0.log"), &log, lines)?;
            let all = fs::read_dir(self.0.path()).unwrap().flatten();
            let mut named = all.filter(|entry| entry.metadata().unwrap().ino() == next.id.1);
            named.next().map(|entry| entry.file_name().into_string().unwrap())
        }
    }

    #[test]
    fn files_follow_in_the_order_of_their_rotation() {
        let folder = Folder::with(&[(FIRST, "1", 30), (SECOND, "2", 20), ("0.log", "3", 10)]);
        let after = |name| folder.after(name, Lines::MayFollow);
        assert_eq!(after(FIRST).as_deref(), Some(SECOND));
        assert_eq!(after(SECOND).as_deref(), Some("0.log"));
        assert_eq!(after("0.log"), None);
    }

    #[test]
    fn a_file_that_is_compressed_has_a_successor_too() {
        let folder = Folder::with(&[(FIRST, "1", 30), (SECOND, "2", 20), ("0.log", "3", 10)]);
        let logs = OpenLogs::default();
        let log = logs.open(&folder.path(FIRST)).unwrap();
        fs::remove_file(folder.path(FIRST)).unwrap();
        fs::write(folder.path(&format!("{FIRST}.gz")), "").unwrap();
        let next = successor(&logs, &folder.path("0.log"), &log, Lines::MayFollow).unwrap();
        assert_eq!(next.id.1, fs::metadata(folder.path(SECOND)).unwrap().ino());
    }

    #[test]
    fn a_log_that_was_replaced_is_not_followed_by_older_files() {
        let folder = Folder::with(&[(FIRST, "1", 30), ("0.log", "2", 20)]);
        let logs = OpenLogs::default();
        let log = logs.open(&folder.path("0.log")).unwrap();
        fs::remove_file(folder.path("0.log")).unwrap();
        fs::write(folder.path("0.log"), "3").unwrap();
        let next = successor(&logs, &folder.path("0.log"), &log, Lines::MayFollow).unwrap();
        assert_eq!(next.id.1, fs::metadata(folder.path("0.log")).unwrap().ino());
    }

    #[test]
    fn lines_on_their_way_are_waited_for() {
        let folder = Folder::with(&[(FIRST, "1", 0), ("0.log", "2", 0)]);
        assert_eq!(folder.after(FIRST, Lines::MayFollow), None, "it was written just now");
        assert_eq!(folder.after(FIRST, Lines::Complete).as_deref(), Some("0.log"));
        folder.written(FIRST, 1);
        assert_eq!(folder.after(FIRST, Lines::MayFollow).as_deref(), Some("0.log"));
        fs::write(folder.path("0.log"), "").unwrap();
        assert_eq!(folder.after(FIRST, Lines::MayFollow), None, "the runtime has not written to the new file");
        let folder = Folder::with(&[(FIRST, "1", 1)]);
        assert_eq!(folder.after(FIRST, Lines::Complete), None, "the runtime has made no new file");
    }
}
