//! Files that are being written right now, as far as inotify tells: reading them would show half a manifest.

use std::collections::HashMap;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::ffi::OsString;
use std::time::Duration;

use inotify::EventMask;
use tokio::time::Instant;

/// A file that was created and not written to within this time is complete (it was linked, not opened).
const CREATED: Duration = Duration::from_millis(30);
/// A periodic look reads a file that is open for writing if nothing was written for this long.
const STALLED: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
enum Hold {
    Created(Instant),
    Writing(Instant),
}

/// The files to leave alone for now.
#[derive(Debug, Default)]
pub struct Holds(HashMap<OsString, Hold>);

impl Holds {
    /// Takes note of an event on the file called `name`.
    pub fn note(&mut self, name: &OsStr, mask: EventMask, now: Instant) {
        if mask.contains(EventMask::MODIFY) {
            self.0.insert(name.to_owned(), Hold::Writing(now));
        } else if mask.contains(EventMask::CREATE) {
            self.0.insert(name.to_owned(), Hold::Created(now));
        } else if !mask.contains(EventMask::ATTRIB) {
            self.0.remove(name);
        }
    }

    /// Forgets everything: events were lost, or the folder is another one.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Names not to read in a look at `now`; `periodic` looks no longer wait for stalled writers.
    pub fn held(&mut self, now: Instant, periodic: bool) -> HashSet<OsString> {
        self.0.retain(|_, hold| match *hold {
            Hold::Created(since) => now < since + CREATED,
            Hold::Writing(since) => !periodic || now < since + STALLED,
        });
        self.0.keys().cloned().collect()
    }

    /// When the next hold ends by itself.
    pub fn next_end(&self) -> Option<Instant> {
        let ends = self.0.values().filter_map(|hold| match *hold {
            Hold::Created(since) => Some(since + CREATED),
            Hold::Writing(_) => None,
        });
        ends.min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_held_from_its_first_write_to_its_close() {
        let start = Instant::now();
        let name = OsStr::new("a");
        let mut holds = Holds::default();
        holds.note(name, EventMask::CREATE, start);
        assert!(holds.held(start, false).contains(name));
        assert_eq!(holds.next_end(), Some(start + CREATED));
        holds.note(name, EventMask::MODIFY, start);
        assert_eq!(holds.next_end(), None);
        assert!(holds.held(start + STALLED * 9, false).contains(name), "writers may take their time");
        holds.note(name, EventMask::ATTRIB, start);
        assert!(holds.held(start, true).contains(name));
        holds.note(name, EventMask::CLOSE_WRITE, start);
        assert!(holds.held(start, false).is_empty());
    }

    #[test]
    fn holds_end_for_links_and_stalled_writers() {
        let start = Instant::now();
        let mut holds = Holds::default();
        holds.note(OsStr::new("linked"), EventMask::CREATE, start);
        assert!(holds.held(start + CREATED, false).is_empty());
        holds.note(OsStr::new("open"), EventMask::MODIFY, start);
        assert!(holds.held(start + STALLED, true).is_empty());
        assert!(holds.held(start, false).is_empty(), "once given up, a hold does not come back");
    }
}
