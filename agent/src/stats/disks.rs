//! Usage of volumes as their file system or device reports it: one call for each, when it is requested and at most once in a
//! period. One that does not answer, as an export whose server is gone, keeps its last usage and a thread of its own.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::durations::Durations;
use crate::kernel::usage::Disk;
use crate::kernel::usage::DiskUsage;
use crate::kernel::usage::MeasuredBy;
use crate::metrics::MetricSource;

/// How long volumes may take to answer before no further ones are queried.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);
/// Volumes that are queried at a time.
const AT_ONCE: usize = 8;
/// Volumes that do not answer, each of which keeps a thread, before no other one is queried.
const MOST_WAITING: usize = 64;
/// Usage that was not requested during this time is dropped.
const KEPT: Duration = Duration::from_secs(600);

/// Usage by the path of a volume.
pub(super) type Usages = HashMap<PathBuf, DiskUsage>;

/// Queries volumes and keeps their usage.
#[derive(Default)]
pub(super) struct Disks(Mutex<HashMap<PathBuf, Known>>, Durations);

/// What is known of a volume.
struct Known {
    disk: Disk,
    source: MetricSource,
    /// When the measurement began that has not ended.
    began: Option<Instant>,
    last: Option<DiskUsage>,
    /// When it answered last.
    answered: Option<Instant>,
    asked: Instant,
}

impl Known {
    fn new(path: PathBuf, by: MeasuredBy, now: Instant) -> Self {
        let (disk, source) = match by {
            MeasuredBy::Device => (Disk::of_device(path), MetricSource::Device),
            MeasuredBy::Walk | MeasuredBy::FileSystem => (Disk::of_volume(path), MetricSource::FileSystem),
        };
        Self { disk, source, began: None, last: None, answered: None, asked: now }
    }

    fn is_due(&self, now: Instant, age: Duration) -> bool {
        let is_old = |at| now.saturating_duration_since(at) >= age;
        self.disk.is_waiting() || self.asked == now && self.answered.is_none_or(is_old)
    }

    /// Measures it now. True if it answered.
    async fn measure(&mut self, now: Instant, durations: &Durations) -> bool {
        let began = *self.began.get_or_insert_with(Instant::now);
        let found = self.disk.measure().await;
        if self.disk.is_waiting() {
            return false;
        }
        // Of an answer that came after its wait had timed out, the time until it was noticed.
        durations.observe(self.source, began.elapsed());
        (self.last, self.answered, self.began) = (found.map(|found| found.usage), Some(now), None);
        true
    }
}

impl Disks {
    pub(super) fn new(durations: Durations) -> Self {
        Self(Mutex::default(), durations)
    }

    /// Usage of these volumes, measured now or at most `age` ago; longer ago if they do not answer. Those that never answered
    /// or cannot be read are absent. If cancelled, what runs goes on.
    pub(super) async fn usages(&self, volumes: &[(PathBuf, MeasuredBy)], age: Duration) -> Usages {
        let mut all = self.0.lock().await;
        let now = Instant::now();
        for (path, by) in volumes {
            all.entry(path.clone()).or_insert_with(|| Known::new(path.clone(), *by, now)).asked = now;
        }
        measure(&mut all, now, age, &self.1).await;
        let is_wanted = |known: &Known| now.saturating_duration_since(known.asked) < KEPT;
        all.retain(|_, known| known.disk.is_waiting() || is_wanted(known));
        volumes.iter().filter_map(|(path, _)| Some((path.clone(), all.get(path)?.last?))).collect()
    }
}

/// Measures those that are due, that which answered longest ago first.
async fn measure(all: &mut HashMap<PathBuf, Known>, now: Instant, age: Duration, durations: &Durations) {
    let due = all.values_mut().filter(|known| known.is_due(now, age));
    let (waiting, mut others): (Vec<&mut Known>, Vec<&mut Known>) = due.partition(|known| known.disk.is_waiting());
    // This takes no time.
    let answers = join_all(waiting.into_iter().map(|known| known.measure(now, durations))).await;
    let mut silent = answers.iter().filter(|answered| !**answered).count();
    others.sort_by_key(|known| known.answered);
    for some in others.chunks_mut(AT_ONCE) {
        if silent >= MOST_WAITING || now.elapsed() >= TURN_TIMEOUT {
            break;
        }
        let answers = join_all(some.iter_mut().map(|known| known.measure(now, durations))).await;
        silent += answers.iter().filter(|answered| !**answered).count();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[tokio::test]
    async fn file_systems_and_devices_are_measured_once_in_a_period() {
        let dir = tempfile::tempdir().unwrap();
        let device = dir.path().join("device");
        fs::write(&device, "1234567").unwrap();
        let gone = dir.path().join("gone");
        let volumes = [
            (dir.path().to_owned(), MeasuredBy::FileSystem),
            (device.clone(), MeasuredBy::Device),
            (gone.clone(), MeasuredBy::FileSystem),
        ];
        let disks = Disks::default();
        let found = disks.usages(&volumes, HOUR).await;
        assert_eq!(found[dir.path()].capacity, DiskUsage::of(dir.path()).unwrap().capacity);
        assert!(found[dir.path()].used > 0 && !found.contains_key(&gone));
        let of_size = |capacity| DiskUsage { capacity, ..DiskUsage::default() };
        assert_eq!(found[&device], of_size(7));
        fs::write(&device, "12345678").unwrap();
        assert_eq!(disks.usages(&volumes, HOUR).await[&device], of_size(7));
        assert_eq!(disks.usages(&volumes, Duration::ZERO).await[&device], of_size(8));
        fs::remove_file(&device).unwrap();
        assert!(!disks.usages(&volumes, Duration::ZERO).await.contains_key(&device), "it is gone");
    }

    #[tokio::test]
    async fn a_volume_that_does_not_answer_keeps_its_usage_and_delays_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (hangs, other) = (dir.path().join("hangs"), dir.path().join("other"));
        let write = |path: &Path, content: &str| fs::write(path, content).unwrap();
        write(&hangs, "1");
        write(&other, "12");
        let volumes = [(hangs.clone(), MeasuredBy::Device), (other.clone(), MeasuredBy::Device)];
        let disks = Disks::default();
        let sizes = async || {
            let found = disks.usages(&volumes, Duration::ZERO).await;
            (found.get(&hangs).map(|usage| usage.capacity), found.get(&other).map(|usage| usage.capacity))
        };
        assert_eq!(sizes().await, (Some(1), Some(2)));
        // Opening it waits until it is opened for writing.
        fs::remove_file(&hangs).unwrap();
        mkfifo(&hangs, Mode::S_IRWXU).unwrap();
        tokio::time::pause();
        disks.usages(&volumes[..1], Duration::ZERO).await;
        tokio::time::resume();
        assert!(disks.0.lock().await[&hangs].disk.is_waiting());
        write(&other, "123");
        assert_eq!(sizes().await, (Some(1), Some(3)));
        // A pipe has no size.
        let _writer = fs::File::options().write(true).open(&hangs).unwrap();
        while sizes().await.0.is_some() {
            tokio::task::yield_now().await;
        }
        assert!(!disks.0.lock().await[&hangs].disk.is_waiting());
    }
}
