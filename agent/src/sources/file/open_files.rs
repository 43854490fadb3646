//! Files that are open for writing according to inotify. They are skipped: reading them would yield half a manifest.

use std::collections::HashMap;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::ffi::OsString;
use std::time::Duration;

use inotify::EventMask;
use tokio::time::Instant;

/// A created file without a write within this time is complete (it was linked, not opened).
const CREATED: Duration = Duration::from_millis(30);
/// A periodic scan reads a file that is open for writing if nothing was written for this long.
const STALLED: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
enum OpenState {
    Created(Instant),
    Writing(Instant),
}

/// The files to skip for now.
#[derive(Debug, Default)]
pub(super) struct OpenFiles(HashMap<OsString, OpenState>);

impl OpenFiles {
    /// Records an event on the file `name`.
    pub(super) fn note(&mut self, name: &OsStr, mask: EventMask, now: Instant) {
        if mask.contains(EventMask::MODIFY) {
            self.0.insert(name.to_owned(), OpenState::Writing(now));
        } else if mask.contains(EventMask::CREATE) {
            self.0.insert(name.to_owned(), OpenState::Created(now));
        } else if !mask.contains(EventMask::ATTRIB) {
            self.0.remove(name);
        }
    }

    /// Drops all state: events were lost, or the folder is another one.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Names to skip in a scan at `now`; `periodic` scans no longer wait for stalled writers.
    pub(super) fn held(&mut self, now: Instant, periodic: bool) -> HashSet<OsString> {
        self.0.retain(|_, state| match *state {
            OpenState::Created(since) => now < since + CREATED,
            OpenState::Writing(since) => !periodic || now < since + STALLED,
        });
        self.0.keys().cloned().collect()
    }

    /// When the next created file counts as complete.
    pub(super) fn next_end(&self) -> Option<Instant> {
        let ends = self.0.values().filter_map(|state| match *state {
            OpenState::Created(since) => Some(since + CREATED),
            OpenState::Writing(_) => None,
        });
        ends.min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_skipped_from_its_first_write_to_its_close() {
        let start = Instant::now();
        let name = OsStr::new("a");
        let mut open_files = OpenFiles::default();
        open_files.note(name, EventMask::CREATE, start);
        assert!(open_files.held(start, false).contains(name));
        assert_eq!(open_files.next_end(), Some(start + CREATED));
        open_files.note(name, EventMask::MODIFY, start);
        assert_eq!(open_files.next_end(), None);
        assert!(
            open_files.held(start + STALLED * 9, false).contains(name),
            "an event-driven scan waits for the writer"
        );
        open_files.note(name, EventMask::ATTRIB, start);
        assert!(open_files.held(start, true).contains(name));
        open_files.note(name, EventMask::CLOSE_WRITE, start);
        assert!(open_files.held(start, false).is_empty());
    }

    #[test]
    fn linked_files_and_stalled_writers_are_read() {
        let start = Instant::now();
        let mut open_files = OpenFiles::default();
        open_files.note(OsStr::new("linked"), EventMask::CREATE, start);
        assert!(open_files.held(start + CREATED, false).is_empty());
        open_files.note(OsStr::new("open"), EventMask::MODIFY, start);
        assert!(open_files.held(start + STALLED, true).is_empty());
        assert!(open_files.held(start, false).is_empty(), "once given up, a file is not skipped again");
    }
}
