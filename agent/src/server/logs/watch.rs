//! One inotify instance for all followers of logs: instances are scarce (128 per user by default), watches are not.
//!
//! Watches the directories of logs and wakes their followers. Without inotify, or after a queue overflow, followers
//! still read once a second.

use std::collections::HashMap;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use futures_util::StreamExt as _;
use inotify::Event;
use inotify::EventMask;
use inotify::EventStream;
use inotify::Inotify;
use inotify::WatchDescriptor;
use inotify::WatchMask;
use inotify::Watches;
use tokio::sync::watch;

/// Shortest time between two wake-ups of followers; a busy log changes thousands of times a second.
const MIN_PAUSE: Duration = Duration::from_millis(5);
/// Additional pause for each follower that was woken, so that many followers do not use up the CPU.
const PAUSE_PER_FOLLOWER: Duration = Duration::from_micros(100);
/// Longest time between two wake-ups.
const MAX_PAUSE: Duration = Duration::from_millis(200);
/// Events per batch.
const BATCH: usize = 256;

/// Watches the directories of logs. Cheap to clone; inotify is set up with the first follower.
#[derive(Clone, Default)]
pub(super) struct FolderWatch {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    watches: Option<Watches>,
    folders: HashMap<WatchDescriptor, Folder>,
}

struct Folder {
    /// Counts changes.
    changed: watch::Sender<u64>,
    followers: usize,
}

/// Receives changes of one directory until it is dropped.
pub(super) struct Following {
    changed: Option<watch::Receiver<u64>>,
    folder: Option<WatchDescriptor>,
    of: FolderWatch,
}

impl FolderWatch {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each change inserts or removes one entry.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches `folder`. If that fails, it is logged and no changes are received.
    pub(super) fn follow(&self, folder: &Path) -> Following {
        match self.try_follow(folder) {
            Ok((folder, changed)) => Following { changed: Some(changed), folder: Some(folder), of: self.clone() },
            Err(error) => {
                tracing::warn!(folder = %folder.display(), %error, "cannot watch a log directory, reading every second");
                Following { changed: None, folder: None, of: self.clone() }
            }
        }
    }

    fn try_follow(&self, path: &Path) -> std::io::Result<(WatchDescriptor, watch::Receiver<u64>)> {
        let mut inner = self.lock();
        let mut watches = match &inner.watches {
            Some(watches) => watches.clone(),
            None => {
                let inotify = Inotify::init()?;
                let watches = inotify.watches();
                tokio::spawn(self.clone().wake(inotify.into_event_stream(vec![0; 4096])?));
                inner.watches.insert(watches).clone()
            }
        };
        // Waits for no disk: the log in this folder has just been opened.
        let mask = WatchMask::MODIFY | WatchMask::CREATE | WatchMask::MOVE | WatchMask::DELETE | WatchMask::ONLYDIR;
        // inotify returns the same watch for the same directory.
        let descriptor = watches.add(path, mask)?;
        let folder = inner
            .folders
            .entry(descriptor.clone())
            .or_insert_with(|| Folder { changed: watch::Sender::new(0), followers: 0 });
        folder.followers += 1;
        Ok((descriptor, folder.changed.subscribe()))
    }

    /// Wakes followers for inotify events.
    async fn wake(self, events: EventStream<Vec<u8>>) {
        let mut batches = events.ready_chunks(BATCH);
        while let Some(batch) = batches.next().await {
            let woken = self.notify(batch.iter().flatten());
            tokio::time::sleep(pause(woken)).await;
        }
    }

    /// Wakes the followers of the changed directories; returns their number.
    fn notify<'a>(&self, events: impl Iterator<Item = &'a Event<std::ffi::OsString>> + Clone) -> usize {
        let inner = self.lock();
        let overrun = events.clone().any(|event| event.mask.contains(EventMask::Q_OVERFLOW));
        let concerned: HashSet<&WatchDescriptor> =
            if overrun { inner.folders.keys().collect() } else { events.map(|event| &event.wd).collect() };
        let folders = concerned.into_iter().filter_map(|folder| inner.folders.get(folder));
        folders
            .map(|folder| {
                folder.changed.send_modify(|count| *count += 1);
                folder.followers
            })
            .sum()
    }

    fn leave(&self, descriptor: &WatchDescriptor) {
        let mut inner = self.lock();
        let Some(folder) = inner.folders.get_mut(descriptor) else { return };
        folder.followers -= 1;
        if folder.followers == 0 {
            inner.folders.remove(descriptor);
            // Fails only if the directory, and with it the watch, was removed.
            let _ = inner.watches.clone().map(|mut watches| watches.remove(descriptor.clone()));
        }
    }

    #[cfg(test)]
    fn counts(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.folders.len(), inner.folders.values().map(|folder| folder.followers).sum())
    }
}

/// The pause after waking this many followers.
fn pause(woken: usize) -> Duration {
    PAUSE_PER_FOLLOWER.saturating_mul(u32::try_from(woken).unwrap_or(u32::MAX)).clamp(MIN_PAUSE, MAX_PAUSE)
}

impl Following {
    /// Marks all changes so far as seen and returns their number; `None` if the directory is not watched.
    pub(super) fn mark_seen(&mut self) -> Option<u64> {
        self.changed.as_mut().map(|changed| *changed.borrow_and_update())
    }

    /// Waits for a change after the last mark, at most for `limit`; false at the timeout.
    pub(super) async fn changed(&mut self, limit: Duration) -> bool {
        let waiting = async {
            if let Some(changed) = &mut self.changed
                && changed.changed().await.is_ok()
            {
                return;
            }
            std::future::pending().await
        };
        tokio::time::timeout(limit, waiting).await.is_ok()
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            self.of.leave(folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn many_followers_share_one_watch() {
        let dir = tempfile::tempdir().unwrap();
        let watch = FolderWatch::default();
        let mut all: Vec<Following> = (0..1000).map(|_| watch.follow(dir.path())).collect();
        assert_eq!(watch.counts(), (1, 1000));
        let started = std::time::Instant::now();
        std::fs::write(dir.path().join("0.log"), "x").unwrap();
        for following in &mut all {
            assert!(following.changed(TIMEOUT).await);
        }
        assert!(started.elapsed() < TIMEOUT, "all were woken");
        drop(all);
        assert_eq!(watch.counts(), (0, 0));
    }

    #[test]
    fn many_followers_are_woken_less_often() {
        let pauses = [1, 50, 1000, usize::MAX].map(|followers| pause(followers).as_millis());
        assert_eq!(pauses, [5, 5, 100, 200]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_directory_is_read_periodically() {
        let mut following = FolderWatch::default().follow(Path::new("/no/such/folder"));
        let before = tokio::time::Instant::now();
        assert!(!following.changed(Duration::from_secs(1)).await);
        assert_eq!(following.mark_seen(), None);
        assert_eq!(before.elapsed(), Duration::from_secs(1));
    }
}
