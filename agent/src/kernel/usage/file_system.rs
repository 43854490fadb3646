//! Sizes of file systems, with a bound: one that does not answer, such as a network file system without its server, blocks
//! one thread and nothing else.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use super::disk::DiskUsage;

/// How long a file system may take to answer.
const DEADLINE: Duration = Duration::from_secs(2);

/// A file system at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileSystem {
    /// Its size and what is left.
    pub usage: DiskUsage,
    /// Its device, which distinguishes it from others.
    pub device: u64,
}

type Read = Arc<dyn Fn(&Path) -> io::Result<FileSystem> + Send + Sync>;

/// The file system of one path.
///
/// Cancelling [`Self::measure`] keeps the reading that runs; the next call awaits it.
pub struct Disk {
    path: PathBuf,
    read: Read,
    /// A reading that has not returned yet; there is never a second one.
    running: Option<JoinHandle<io::Result<FileSystem>>>,
    /// Why the last reading failed.
    failure: Option<String>,
}

impl Disk {
    /// Of the file system that contains `path`. Nothing is read yet.
    pub fn new(path: PathBuf) -> Self {
        Self::reading_with(path, Arc::new(read))
    }

    fn reading_with(path: PathBuf, read: Read) -> Self {
        Self { path, read, running: None, failure: None }
    }

    /// The file system now; `None` if it cannot be read or does not answer in time, which is logged once.
    pub async fn measure(&mut self) -> Option<FileSystem> {
        let patience = if self.running.is_some() { Duration::ZERO } else { DEADLINE };
        let running = self.running.get_or_insert_with(|| {
            let (path, read) = (self.path.clone(), self.read.clone());
            tokio::task::spawn_blocking(move || read(&path))
        });
        let Ok(returned) = tokio::time::timeout(patience, running).await else {
            return self.failed(format!("it has not answered for {DEADLINE:?}"));
        };
        self.running = None;
        match returned {
            Ok(Ok(found)) => {
                self.failure = None;
                Some(found)
            }
            Ok(Err(error)) => self.failed(error.to_string()),
            Err(error) => self.failed(error.to_string()),
        }
    }

    fn failed(&mut self, reason: String) -> Option<FileSystem> {
        if self.failure.as_ref() != Some(&reason) {
            tracing::warn!(path = %self.path.display(), reason, "cannot read the size of a file system");
            self.failure = Some(reason);
        }
        None
    }
}

fn read(path: &Path) -> io::Result<FileSystem> {
    Ok(FileSystem { usage: DiskUsage::of(path)?, device: std::fs::metadata(path)?.dev() })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn file_systems_that_answer() {
        let mut disk = Disk::new("/".into());
        assert!(disk.measure().await.is_some_and(|found| found.usage.capacity > 0));
        assert!(Disk::new("/no/such/folder".into()).measure().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_hangs_blocks_one_thread_and_is_read_again_later() {
        let (answer, answers) = mpsc::channel::<()>();
        let (answers, asked) = (Mutex::new(answers), Arc::new(Mutex::new(0)));
        let counted = asked.clone();
        let hanging = move |_: &Path| {
            *counted.lock().unwrap() += 1;
            answers.lock().unwrap().recv().map_err(io::Error::other)?;
            Ok(FileSystem { usage: DiskUsage::default(), device: 7 })
        };
        let mut disk = Disk::reading_with("/mnt".into(), Arc::new(hanging));
        let (first, ()) = tokio::join!(disk.measure(), tokio::time::advance(DEADLINE * 2));
        assert_eq!(first, None);
        assert_eq!(disk.measure().await, None, "without waiting");
        answer.send(()).unwrap();
        while disk.measure().await.is_none() {
            tokio::task::yield_now().await;
        }
        assert_eq!(*asked.lock().unwrap(), 1, "it was the first reading that has returned");
    }
}
