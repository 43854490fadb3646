//! One inotify instance for all who follow logs: instances are scarce (128 per user by default), watches are not.
//!
//! Owns which folders are watched and wakes their followers. Refuses to read anything. Without inotify, or with its
//! queue overrun, followers still look once a second.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use futures_util::StreamExt as _;
use inotify::EventMask;
use inotify::EventStream;
use inotify::Inotify;
use inotify::WatchDescriptor;
use inotify::WatchMask;
use inotify::Watches;
use tokio::sync::watch;

/// A busy log changes thousands of times a second: its followers are woken at most once in this time.
const BETWEEN_WAKES: Duration = Duration::from_millis(5);
/// Events taken in one go.
const BATCH: usize = 256;

/// Watches the folders of logs. Cheap to clone; nothing is set up before somebody follows.
#[derive(Clone, Default)]
pub(super) struct LogWatch {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    watches: Option<Watches>,
    folders: HashMap<WatchDescriptor, Folder>,
}

struct Folder {
    changed: watch::Sender<()>,
    followers: usize,
}

/// Hears of changes in one folder, as long as it lives.
pub(super) struct Following {
    changed: Option<watch::Receiver<()>>,
    folder: Option<WatchDescriptor>,
    of: LogWatch,
}

impl LogWatch {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Only whole entries are put in and taken out.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to hear of changes in `folder`. What cannot be watched is told in the log, and never heard of.
    pub(super) fn follow(&self, folder: &Path) -> Following {
        match self.try_follow(folder) {
            Ok((folder, changed)) => Following { changed: Some(changed), folder: Some(folder), of: self.clone() },
            Err(error) => {
                tracing::warn!(folder = %folder.display(), %error, "cannot watch a log folder, looking every second");
                Following { changed: None, folder: None, of: self.clone() }
            }
        }
    }

    fn try_follow(&self, path: &Path) -> std::io::Result<(WatchDescriptor, watch::Receiver<()>)> {
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
        let mask = WatchMask::MODIFY | WatchMask::CREATE | WatchMask::MOVE | WatchMask::DELETE | WatchMask::ONLYDIR;
        // A folder watched twice is the same watch.
        let descriptor = watches.add(path, mask)?;
        let folder = inner
            .folders
            .entry(descriptor.clone())
            .or_insert_with(|| Folder { changed: watch::Sender::new(()), followers: 0 });
        folder.followers += 1;
        Ok((descriptor, folder.changed.subscribe()))
    }

    /// Tells the followers of what the kernel tells, for as long as anybody can follow.
    async fn wake(self, events: EventStream<Vec<u8>>) {
        let mut batches = events.ready_chunks(BATCH);
        while let Some(batch) = batches.next().await {
            {
                let inner = self.lock();
                let overrun = batch.iter().flatten().any(|event| event.mask.contains(EventMask::Q_OVERFLOW));
                if overrun {
                    inner.folders.values().for_each(|folder| folder.changed.send_modify(|()| ()));
                }
                let mut woken: Vec<&WatchDescriptor> = Vec::new();
                for event in batch.iter().flatten() {
                    if !woken.contains(&&event.wd) {
                        woken.push(&event.wd);
                        inner.folders.get(&event.wd).inspect(|folder| folder.changed.send_modify(|()| ()));
                    }
                }
            }
            tokio::time::sleep(BETWEEN_WAKES).await;
        }
    }

    fn leave(&self, descriptor: &WatchDescriptor) {
        let mut inner = self.lock();
        let Some(folder) = inner.folders.get_mut(descriptor) else { return };
        folder.followers -= 1;
        if folder.followers == 0 {
            inner.folders.remove(descriptor);
            // Fails only where the folder, and with it the watch, is gone.
            let _ = inner.watches.clone().map(|mut watches| watches.remove(descriptor.clone()));
        }
    }

    #[cfg(test)]
    fn counts(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.folders.len(), inner.folders.values().map(|folder| folder.followers).sum())
    }
}

impl Following {
    /// What has happened so far needs no waking.
    pub(super) fn mark_seen(&mut self) {
        if let Some(changed) = &mut self.changed {
            changed.mark_unchanged();
        }
    }

    /// Waits for a change after the last mark, at most for `limit`.
    pub(super) async fn changed(&mut self, limit: Duration) {
        let waiting = async {
            if let Some(changed) = &mut self.changed
                && changed.changed().await.is_ok()
            {
                return;
            }
            std::future::pending().await
        };
        // Running into the limit is a look as good as any.
        let _ = tokio::time::timeout(limit, waiting).await;
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

    const PATIENCE: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn many_followers_share_one_watch() {
        let dir = tempfile::tempdir().unwrap();
        let watch = LogWatch::default();
        let mut all: Vec<Following> = (0..1000).map(|_| watch.follow(dir.path())).collect();
        assert_eq!(watch.counts(), (1, 1000));
        let started = std::time::Instant::now();
        std::fs::write(dir.path().join("0.log"), "x").unwrap();
        for following in &mut all {
            following.changed(PATIENCE).await;
        }
        assert!(started.elapsed() < PATIENCE, "all were woken");
        drop(all);
        assert_eq!(watch.counts(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_folder_that_is_not_there_is_looked_at_by_the_clock() {
        let mut following = LogWatch::default().follow(Path::new("/no/such/folder"));
        let before = tokio::time::Instant::now();
        following.changed(Duration::from_secs(1)).await;
        assert_eq!(before.elapsed(), Duration::from_secs(1));
    }
}
