//! Replaces a file with the newest content, in a task of its own: a disk that blocks must not delay an eviction.

use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;

/// For how long a write is waited for.
const WRITE_TIMEOUT: Duration = Duration::from_millis(500);

/// A content with its number.
type Numbered = (u64, Vec<u8>);

/// A file, with the task that writes it.
#[derive(Debug)]
pub(super) struct Writer {
    path: PathBuf,
    newest: watch::Sender<Numbered>,
    /// Number of the last content that was written, or could not be.
    done: watch::Receiver<u64>,
    /// Number of the last content that was waited for in vain.
    given_up: Arc<AtomicU64>,
}

impl Writer {
    /// Starts the task. It ends when the writer was dropped and the newest content is written.
    pub(super) fn start(path: &Path) -> Self {
        let (newest, contents) = watch::channel((0, Vec::new()));
        let (sender, done) = watch::channel(0);
        // Not supervised: if it panics, its channel is closed, which ends the wait for a write.
        tokio::spawn(run(path.to_owned(), contents, sender));
        Self { path: path.to_owned(), newest, done, given_up: Arc::default() }
    }

    /// Has the file replaced. Returns what can be waited for; `None` while a write hangs that was waited for in vain: the
    /// newest content follows it.
    pub(super) fn send(&self, content: Vec<u8>) -> Option<Pending> {
        let number = self.newest.borrow().0 + 1;
        self.newest.send_replace((number, content));
        let (path, done, given_up) = (self.path.clone(), self.done.clone(), self.given_up.clone());
        let hangs = *done.borrow() < given_up.load(Ordering::Relaxed);
        (!hangs).then_some(Pending { path, number, done, given_up })
    }
}

/// A write that may not be done yet.
#[derive(Debug)]
pub(super) struct Pending {
    path: PathBuf,
    number: u64,
    done: watch::Receiver<u64>,
    given_up: Arc<AtomicU64>,
}

impl Pending {
    /// Waits for the write for a bounded time.
    pub(super) async fn wait(self) {
        let Self { path, number, mut done, given_up } = self;
        let written = tokio::time::timeout(WRITE_TIMEOUT, done.wait_for(|done| *done >= number)).await;
        if !written.is_ok_and(|written| written.is_ok()) {
            given_up.fetch_max(number, Ordering::Relaxed);
            let file = path.display();
            tracing::warn!(%file, "writing the record of evictions takes too long; evictions do not wait for it");
        }
    }
}

async fn run(path: PathBuf, mut contents: watch::Receiver<Numbered>, done: watch::Sender<u64>) {
    while contents.changed().await.is_ok() {
        let (number, content) = contents.borrow_and_update().clone();
        if let Err(error) = replace(&path, content).await {
            tracing::warn!(file = %path.display(), %error, "cannot record the evictions that are not finished");
        }
        done.send_replace(number);
    }
}

/// Replaces the file atomically. It is not synced: after a crash of the machine it is not needed.
async fn replace(path: &Path, content: Vec<u8>) -> io::Result<()> {
    let partial = path.with_extension("partial");
    tokio::fs::write(&partial, content).await?;
    tokio::fs::rename(&partial, path).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_has_panicked_has_written_nothing() {
        let (number, done, given_up) = (1, watch::channel(0).1, Arc::<AtomicU64>::default());
        Pending { path: PathBuf::new(), number, done, given_up: given_up.clone() }.wait().await;
        assert_eq!(given_up.load(Ordering::Relaxed), number, "the next one is not waited for");
    }
}
