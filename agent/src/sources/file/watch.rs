//! inotify watch on the static pod path: on the folder, on the folder of a single file, or, while the path does not
//! exist, on its nearest existing ancestor. Reports when to scan and when the path was replaced; reads no file.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt;
use inotify::EventMask;
use inotify::EventStream;
use inotify::Inotify;
use inotify::WatchDescriptor;
use inotify::WatchMask;
use tokio::time::Instant;

use super::open_files::OpenFiles;

/// A burst of events ends after this long without one...
const QUIET: Duration = Duration::from_millis(2);
/// ...or when it has lasted this long.
const BURST: Duration = Duration::from_millis(20);

/// What a burst of inotify events means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WatchResult {
    /// Files may have changed: scan.
    Changed,
    /// The path is another file or folder now: set up a new watch, then scan.
    Replaced,
}

/// What is watched. Equal targets need no new watch.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Target {
    /// The folder itself, by device and inode.
    Folder(u64, u64),
    /// A file, by the folder it is in.
    Single(PathBuf, u64, u64),
    /// Nothing: the nearest ancestor that exists.
    Ancestor(PathBuf, u64, u64),
}

impl Target {
    fn of(path: &Path) -> Self {
        let id = |path: &Path| fs::metadata(path).map_or((0, 0), |m| (m.dev(), m.ino()));
        match fs::metadata(path) {
            Ok(meta) if meta.is_dir() => return Self::Folder(meta.dev(), meta.ino()),
            Ok(_) => {
                let parent = parent(path);
                let (device, inode) = id(&parent);
                return Self::Single(parent, device, inode);
            }
            Err(_) => {}
        }
        let mut ancestor = parent(path);
        while !ancestor.is_dir() && ancestor.as_os_str() != "/" && ancestor.as_os_str() != "." {
            ancestor = parent(&ancestor);
        }
        let (device, inode) = id(&ancestor);
        Self::Ancestor(ancestor, device, inode)
    }
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) => parent.to_owned(),
        None => PathBuf::from("/"),
    }
}

/// A live inotify instance. Dropping it ends the watch.
pub(super) struct Watch {
    events: EventStream<Vec<u8>>,
    target: Target,
    main: WatchDescriptor,
    /// The only relevant entry of the watched folder, if not all are.
    only: Option<OsString>,
    /// A symbolic link that leads to the folder, watched in the folder the link is in.
    link: Option<(WatchDescriptor, OsString)>,
    /// Files that were deleted; some may exist again.
    deleted: BTreeSet<OsString>,
}

impl Watch {
    /// Starts the watch. Changes from now on are reported; earlier ones need a scan. Blocks.
    ///
    /// # Errors
    /// inotify refuses an instance or a watch.
    pub(super) fn arm(path: &Path) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let mut watches = inotify.watches();
        let places = WatchMask::CREATE | WatchMask::DELETE | WatchMask::MOVE | WatchMask::ONLYDIR;
        let own = WatchMask::DELETE_SELF | WatchMask::MOVE_SELF;
        let files = places | own | WatchMask::MODIFY | WatchMask::CLOSE_WRITE | WatchMask::ATTRIB;
        let target = Target::of(path);
        let name = path.file_name().map(OsStr::to_owned);
        let (main, only) = match &target {
            Target::Folder(..) => (watches.add(path, files)?, None),
            Target::Single(parent, ..) => (watches.add(parent, files)?, name.clone()),
            Target::Ancestor(ancestor, ..) => {
                let rest = path.strip_prefix(ancestor).unwrap_or(path);
                let next = rest.components().next().map(|c| c.as_os_str().to_owned());
                (watches.add(ancestor, places | own)?, next)
            }
        };
        let is_link = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink());
        let link = match (&target, name) {
            (Target::Folder(..), Some(name)) if is_link => Some((watches.add(parent(path), places)?, name)),
            _ => None,
        };
        Ok(Self {
            events: inotify.into_event_stream(vec![0; 4096])?,
            target,
            main,
            only,
            link,
            deleted: BTreeSet::new(),
        })
    }

    /// False if the path no longer is what this watch was set up on.
    pub(super) async fn is_current(&self, path: &Path) -> bool {
        let path = path.to_owned();
        let target = tokio::task::spawn_blocking(move || Target::of(&path)).await;
        target.is_ok_and(|target| target == self.target)
    }

    /// The files that were deleted since the last call, by name; a single file has an empty one. A renamed file is not
    /// deleted.
    pub(super) fn take_deleted(&mut self) -> BTreeSet<OsString> {
        std::mem::take(&mut self.deleted)
    }

    /// Waits for a burst of relevant events and consumes all of it. Cancel-safe: an event that was read is recorded.
    pub(super) async fn next(&mut self, open_files: &mut OpenFiles) -> WatchResult {
        let mut wake = loop {
            let Some(wake) = self.one(open_files).await else { continue };
            break wake;
        };
        let end = Instant::now() + BURST;
        while wake == WatchResult::Changed {
            let until = (Instant::now() + QUIET).min(end);
            match tokio::time::timeout_at(until, self.one(open_files)).await {
                Ok(Some(WatchResult::Replaced)) => wake = WatchResult::Replaced,
                Ok(_) => {}
                Err(_) => break,
            }
        }
        wake
    }

    /// Reads one event; `None` if it is irrelevant.
    async fn one(&mut self, open_files: &mut OpenFiles) -> Option<WatchResult> {
        let event = match self.events.next().await {
            Some(Ok(event)) => event,
            // This inotify instance is unusable; a new one may work.
            Some(Err(_)) | None => return Some(WatchResult::Replaced),
        };
        let mask = event.mask;
        if mask.contains(EventMask::Q_OVERFLOW) {
            open_files.clear();
            return Some(WatchResult::Changed);
        }
        if let Some((link, name)) = &self.link
            && event.wd == *link
        {
            return (event.name.as_ref() == Some(name)).then_some(WatchResult::Replaced);
        }
        let own = EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::UNMOUNT | EventMask::IGNORED;
        if event.wd == self.main && mask.intersects(own) {
            return Some(WatchResult::Replaced);
        }
        let name = event.name?;
        match (&self.target, &self.only) {
            (_, Some(only)) if *only != name => None,
            (Target::Ancestor(..), _) => Some(WatchResult::Replaced),
            (Target::Single(..), _) if mask.contains(EventMask::ISDIR) => Some(WatchResult::Replaced),
            (Target::Single(..), _) => {
                self.note(OsStr::new(""), mask, open_files);
                Some(WatchResult::Changed)
            }
            (Target::Folder(..), _) => self.folder_event(&name, mask, open_files),
        }
    }

    fn note(&mut self, name: &OsStr, mask: EventMask, open_files: &mut OpenFiles) {
        open_files.note(name, mask, Instant::now());
        if mask.contains(EventMask::DELETE) {
            self.deleted.insert(name.to_owned());
        }
    }

    /// Hidden files are not manifests, except that names starting with two dots are the links of atomically swapped
    /// folders.
    fn folder_event(&mut self, name: &OsStr, mask: EventMask, open_files: &mut OpenFiles) -> Option<WatchResult> {
        let bytes = name.as_bytes();
        if bytes.starts_with(b".") {
            return bytes.starts_with(b"..").then_some(WatchResult::Changed);
        }
        self.note(name, mask, open_files);
        // A write alone needs no scan: the file is skipped until it is closed.
        let only_written = mask == EventMask::MODIFY;
        (!only_written).then_some(WatchResult::Changed)
    }
}
