//! Sizes of volumes that their file system counts: one system call for each, whatever the volume holds, so that they are
//! read for every request. A volume whose count cannot be read is left to the walker.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio::time::timeout;

use super::Folder;
use super::FsUsage;
use super::Sizes;
use super::durations::Durations;
use crate::kernel::project_quota;
use crate::metrics::MetricSource;
use crate::model::PodUid;

/// How long all file systems together may take to answer.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the failure of a volume is remembered after its last request.
const KEPT: Duration = Duration::from_secs(600);

type Read = Arc<dyn Fn(&Path, u32) -> io::Result<FsUsage> + Send + Sync>;

/// Reads the sizes.
pub(super) struct Quotas {
    read: Read,
    /// Held by the thread that reads: a file system that hangs keeps one thread.
    reading: Arc<Mutex<()>>,
    /// Volumes that could not be read, which is logged once, and when they were last requested.
    failed: std::sync::Mutex<HashMap<(PodUid, String), Instant>>,
    durations: Durations,
}

impl Default for Quotas {
    fn default() -> Self {
        Self::reading_with(Arc::new(|path, project| {
            let usage = project_quota::usage(path, project)?;
            Ok(FsUsage { bytes: usage.bytes, inodes: usage.inodes })
        }))
    }
}

impl Quotas {
    fn reading_with(read: Read) -> Self {
        Self { read, reading: Arc::default(), failed: std::sync::Mutex::default(), durations: Durations::default() }
    }

    pub(super) fn with_durations(self, durations: Durations) -> Self {
        Self { durations, ..self }
    }

    /// Sizes by pod and volume of the folders that have a project, and the folders that are to be walked: the others, and
    /// those that cannot be read.
    pub(super) async fn sizes(&self, folders: Vec<Folder>) -> (Sizes, Vec<Folder>) {
        let (counted, mut walked): (Vec<Folder>, Vec<Folder>) =
            folders.into_iter().partition(|folder| folder.project.is_some());
        let mut sizes = Sizes::new();
        if counted.is_empty() {
            return (sizes, walked);
        }
        let results = self.results(counted.clone()).await;
        let results = results.unwrap_or_else(|| counted.iter().map(|_| Err(io::ErrorKind::TimedOut.into())).collect());
        for (folder, result) in counted.into_iter().zip(results) {
            self.note(&folder, result.as_ref().err());
            match result {
                Ok(used) => sizes.entry(folder.uid).or_default().push((folder.volume, used)),
                Err(_) => walked.push(folder),
            }
        }
        (sizes, walked)
    }

    /// One result for each folder; `None` if a file system does not answer.
    async fn results(&self, folders: Vec<Folder>) -> Option<Vec<io::Result<FsUsage>>> {
        let began = Instant::now();
        let permit = timeout(READ_TIMEOUT, self.reading.clone().lock_owned()).await.ok()?;
        let (read, durations) = (self.read.clone(), self.durations.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let one = |folder: Folder| {
                let began = std::time::Instant::now();
                let result = read(&folder.path, folder.project.unwrap_or_default());
                // One that cannot be read is walked, and observed then.
                if result.is_ok() {
                    durations.observe(MetricSource::Quota, began.elapsed());
                }
                result
            };
            folders.into_iter().map(one).collect()
        });
        timeout(READ_TIMEOUT.saturating_sub(began.elapsed()), reading).await.ok()?.ok()
    }

    fn note(&self, folder: &Folder, error: Option<&io::Error>) {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        let mut failed = self.failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (now, key) = (Instant::now(), (folder.uid.clone(), folder.volume.clone()));
        failed.retain(|_, asked| now.saturating_duration_since(*asked) < KEPT);
        let Some(error) = error else {
            failed.remove(&key);
            return;
        };
        if failed.insert(key, now).is_none() {
            let (directory, project) = (folder.path.display(), folder.project);
            tracing::warn!(%directory, project, %error, "cannot read what a volume's project uses: the volume is walked");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;

    use super::*;
    use crate::metrics::Metrics;

    fn folder(volume: &str, project: Option<u32>) -> Folder {
        Folder { uid: "u".into(), volume: volume.to_owned(), path: format!("/{volume}").into(), project }
    }

    fn names(folders: &[Folder]) -> Vec<&str> {
        folders.iter().map(|folder| folder.volume.as_str()).collect()
    }

    #[tokio::test]
    async fn what_has_no_project_or_cannot_be_read_is_walked() {
        let broken = Arc::new(AtomicBool::new(true));
        let is_broken = broken.clone();
        let quotas = Quotas::reading_with(Arc::new(move |path, project| match path.to_str() {
            Some("/broken") if is_broken.load(Ordering::Relaxed) => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            _ => Ok(FsUsage { bytes: u64::from(project), inodes: 1 }),
        }));
        let all = || vec![folder("a", Some(7)), folder("plain", None), folder("broken", Some(8)), folder("b", Some(9))];
        let (sizes, walked) = quotas.sizes(all()).await;
        let used = |bytes| FsUsage { bytes, inodes: 1 };
        assert_eq!(sizes[&PodUid::from("u")], [("a".to_owned(), used(7)), ("b".to_owned(), used(9))]);
        assert_eq!(names(&walked), ["plain", "broken"]);
        quotas.sizes(all()).await;
        assert_eq!(quotas.failed.lock().unwrap().len(), 1);
        broken.store(false, Ordering::Relaxed);
        let (sizes, walked) = quotas.sizes(all()).await;
        assert_eq!((sizes[&PodUid::from("u")].len(), names(&walked)), (3, vec!["plain"]));
        assert!(quotas.failed.lock().unwrap().is_empty(), "the next failure is logged again");
    }

    #[tokio::test]
    async fn what_is_read_is_timed() {
        let metrics = Metrics::new();
        let quotas = Quotas::reading_with(Arc::new(|path, _| match path.to_str() {
            Some("/broken") => Err(io::Error::from_raw_os_error(libc::ESRCH)),
            _ => Ok(FsUsage::default()),
        }));
        let quotas = quotas.with_durations(Durations::new(metrics.clone()));
        quotas.sizes(vec![folder("a", Some(7)), folder("plain", None), folder("broken", Some(8))]).await;
        let text = metrics.render().unwrap();
        let line = "kubelet_volume_metric_collection_duration_seconds_count{metric_source=\"fsquota\"} 1\n";
        assert!(text.contains(line), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_system_that_hangs_keeps_one_thread_and_leaves_its_volumes_to_the_walker() {
        let (answer, answers) = mpsc::channel::<()>();
        let answers = std::sync::Mutex::new(answers);
        let quotas = Quotas::reading_with(Arc::new(move |_, _| {
            answers.lock().unwrap().recv().map_err(io::Error::other)?;
            Ok(FsUsage::default())
        }));
        let (first, ()) =
            tokio::join!(quotas.sizes(vec![folder("a", Some(7))]), tokio::time::advance(READ_TIMEOUT * 2));
        assert_eq!(names(&first.1), ["a"]);
        // Without a second thread, which would make its result known.
        let (second, ()) =
            tokio::join!(quotas.sizes(vec![folder("b", Some(8))]), tokio::time::advance(READ_TIMEOUT * 2));
        assert_eq!(names(&second.1), ["b"]);
        answer.send(()).unwrap();
        answer.send(()).unwrap();
        let (sizes, walked) = quotas.sizes(vec![folder("a", Some(7))]).await;
        assert_eq!((sizes.len(), walked.len()), (1, 0));
    }

    #[tokio::test]
    async fn a_volume_that_is_gone_is_left_to_the_walker() {
        let dir = tempfile::tempdir().unwrap();
        let missing = Folder { path: dir.path().join("none"), ..folder("a", Some(7)) };
        let (sizes, walked) = Quotas::default().sizes(vec![missing]).await;
        assert_eq!((sizes.len(), names(&walked)), (0, vec!["a"]));
    }
}
