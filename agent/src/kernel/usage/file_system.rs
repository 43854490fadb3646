//! Sizes of file systems, with a bound: one that does not answer, such as a network file system without its server, blocks
//! one thread and nothing else.

use std::fs::File;
use std::io;
use std::io::Seek as _;
use std::io::SeekFrom;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::statfs::BTRFS_SUPER_MAGIC;
use nix::sys::statfs::statfs;
use tokio::sync::oneshot;

use super::disk::DiskUsage;
use crate::filesystem;

/// How long a file system may take to answer.
const DEADLINE: Duration = Duration::from_secs(2);
/// Bytes of the stack of a thread that makes a few system calls.
const STACK: usize = 256 << 10;

/// A file system at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileSystem {
    /// Its size and what is left.
    pub usage: DiskUsage,
    /// Its device, which distinguishes it from others.
    pub device: u64,
}

/// How the size of a volume is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeasuredBy {
    /// Its files are counted.
    Walk,
    /// What its file system reports, which may hold other files too.
    FileSystem,
    /// The size of its device. What is in use of it is unknown.
    Device,
}

type Read = Arc<dyn Fn(&Path) -> io::Result<FileSystem> + Send + Sync>;
type Work = Box<dyn FnOnce() + Send>;

/// The file system of one path.
///
/// Cancelling [`Self::measure`] keeps the reading that runs; the next call awaits it.
pub struct Disk {
    path: PathBuf,
    read: Read,
    /// Starts a reading.
    start: fn(Work),
    /// The path may be removed at any time, which is no failure.
    may_vanish: bool,
    /// A reading that has not returned yet; there is never a second one.
    running: Option<oneshot::Receiver<io::Result<FileSystem>>>,
    /// Why the last reading failed.
    failure: Option<String>,
}

impl Disk {
    /// Of the file system that contains `path`. Nothing is read yet.
    pub fn new(path: PathBuf) -> Self {
        Self::reading_with(path, Arc::new(read))
    }

    /// Of the file system that contains `path`, which may be one of a network. Each reading has a thread of its own: those of
    /// the pool are limited, and many such file systems do not answer if one server does not.
    pub fn of_volume(path: PathBuf) -> Self {
        Self { start: on_own_thread, may_vanish: true, ..Self::new(path) }
    }

    /// Of the block device at `path`, links followed: its capacity only. Each reading has a thread of its own.
    pub fn of_device(path: PathBuf) -> Self {
        Self { start: on_own_thread, may_vanish: true, ..Self::reading_with(path, Arc::new(read_device)) }
    }

    fn reading_with(path: PathBuf, read: Read) -> Self {
        Self { path, read, start: in_pool, may_vanish: false, running: None, failure: None }
    }

    /// The path that it was made for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True if a reading has not returned: the next call of [`Self::measure`] does not wait for it.
    pub fn is_waiting(&self) -> bool {
        self.running.is_some()
    }

    /// The file system now; `None` if it cannot be read or does not answer in time, which is logged once unless a volume is
    /// gone.
    pub async fn measure(&mut self) -> Option<FileSystem> {
        let timeout = if self.running.is_some() { Duration::ZERO } else { DEADLINE };
        let running = self.running.get_or_insert_with(|| {
            let ((answer, running), path, read) = (oneshot::channel(), self.path.clone(), self.read.clone());
            (self.start)(Box::new(move || {
                // The receiver is gone once the disk is dropped.
                let _ = answer.send(read(&path));
            }));
            running
        });
        let Ok(returned) = tokio::time::timeout(timeout, running).await else {
            return self.failed(format!("it has not answered for {DEADLINE:?}"));
        };
        self.running = None;
        match returned {
            Ok(Ok(found)) => {
                self.failure = None;
                Some(found)
            }
            Ok(Err(error)) if self.may_vanish && error.kind() == io::ErrorKind::NotFound => None,
            Ok(Err(error)) => self.failed(error.to_string()),
            Err(_) => self.failed("there is no thread to read it".to_owned()),
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

fn in_pool(work: Work) {
    drop(tokio::task::spawn_blocking(work));
}

fn on_own_thread(work: Work) {
    // Without a thread the work is dropped, which closes the receiver's channel.
    let _ = std::thread::Builder::new().name("volume".to_owned()).stack_size(STACK).spawn(work);
}

fn read(path: &Path) -> io::Result<FileSystem> {
    Ok(FileSystem { usage: DiskUsage::of(path)?, device: device_of(path)? })
}

/// As upstream, subvolumes of btrfs, which have device numbers of their own, are on the device that they share.
fn device_of(path: &Path) -> io::Result<u64> {
    let own = std::fs::metadata(path)?.dev();
    match statfs(path)?.filesystem_type() {
        BTRFS_SUPER_MAGIC => Ok(filesystem::file_system_number(path).unwrap_or(own)),
        _ => Ok(own),
    }
}

/// Seeking reads nothing of the device.
fn read_device(path: &Path) -> io::Result<FileSystem> {
    let mut opened = File::open(path)?;
    let usage = DiskUsage { capacity: opened.seek(SeekFrom::End(0))?, ..DiskUsage::default() };
    Ok(FileSystem { usage, device: opened.metadata()?.rdev() })
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
        let mut volume = Disk::of_volume("/".into());
        assert!(volume.measure().await.is_some_and(|found| found.usage.capacity > 0));
        assert!(!volume.is_waiting());
    }

    #[tokio::test]
    async fn a_volume_that_is_gone_is_no_failure() {
        let missing = || PathBuf::from("/no/such/folder");
        for (mut disk, is_failure) in
            [(Disk::of_volume(missing()), false), (Disk::of_device(missing()), false), (Disk::new(missing()), true)]
        {
            assert!(disk.measure().await.is_none());
            assert_eq!(disk.failure.is_some(), is_failure, "what is logged: {:?}", disk.failure);
        }
    }

    #[tokio::test]
    async fn a_device_has_a_capacity_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, vec![7; 12_345]).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let found = Disk::of_device(link).measure().await.expect("a size");
        assert_eq!(found.usage, DiskUsage { capacity: 12_345, ..DiskUsage::default() });
        assert!(Disk::of_device(dir.path().join("none")).measure().await.is_none());
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
