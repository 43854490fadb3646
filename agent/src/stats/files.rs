//! Logs and other files of pods outside their volumes: one folder for each container, written by the runtime. Measured when
//! asked for, kept for a while, and within a time limit: those that were measured longest ago come first. One thread
//! measures at a time: a disk that hangs keeps that one, and readers get what is known. Blocks.

use std::collections::HashMap;
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::Condvar;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::thread;
use std::time::Duration;
use std::time::Instant as RealInstant;

use tokio::time::Instant;

use super::Folders;
use super::FsUsage;
use crate::model::PodRef;
use crate::model::PodUid;

/// Files of a log folder that are looked at: the runtime and the rotation of logs keep a handful.
const LONGEST_LISTING: usize = 1000;
/// How long a reader waits for a disk that hangs.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Files of one pod outside its volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PodFiles {
    /// Logs by container.
    pub(super) logs: HashMap<String, FsUsage>,
    /// Other files of the pod: in its log folder, and its hosts file.
    pub(super) other: FsUsage,
}

/// The files of pods.
pub(super) struct Found {
    /// As far as they are known.
    pub(super) files: HashMap<PodUid, PodFiles>,
    /// The thread that measures has not ended in time, or failed: files of pods are missing, or older than was asked for.
    pub(super) is_late: bool,
}

/// How fresh results must be, and how long measuring may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// Results of this age are used again.
    pub(super) max_age: Duration,
    /// After this time the older results are used; pods without one are measured in any case.
    pub(super) limit: Duration,
    /// After this time what is known is returned.
    pub(super) timeout: Duration,
}

impl Effort {
    /// For a request of a monitoring system.
    pub(super) const SCRAPE: Self =
        Self { max_age: Duration::from_secs(10), limit: Duration::from_millis(5), timeout: TIMEOUT };
    /// For an eviction.
    pub(super) const NOW: Self = Self { max_age: Duration::ZERO, limit: Duration::from_secs(1), timeout: TIMEOUT };
}

/// The files of all pods, as far as they were measured. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Files(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// The thread that measured has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    known: HashMap<PodUid, (Instant, PodFiles)>,
    /// A thread measures, and readers wait for it until then.
    awaited_until: Option<RealInstant>,
}

/// Pods that are to be measured, and whether an older result is known of each.
type Due = Vec<(bool, PodRef)>;

impl Files {
    /// The files of the wanted ones of these pods. What is known of the others stays; of pods that are not among these it is
    /// dropped. Waits for a measurement in progress, and then for its own.
    pub(super) fn measure(
        &self,
        folders: &Folders,
        pods: &[PodRef],
        wanted: impl Fn(&PodUid) -> bool,
        effort: Effort,
    ) -> Found {
        let folders = folders.clone();
        self.measure_by(move |pod| of_pod(&folders, pod), pods, wanted, effort)
    }

    fn measure_by(
        &self,
        of_pod: impl Fn(&PodRef) -> PodFiles + Send + 'static,
        pods: &[PodRef],
        wanted: impl Fn(&PodUid) -> bool,
        effort: Effort,
    ) -> Found {
        let wanted: Vec<&PodRef> = pods.iter().filter(|pod| wanted(&pod.uid)).collect();
        let mut state = self.0.await_thread();
        let now = Instant::now();
        let due = state.due(pods, &wanted, now, effort.max_age);
        if state.awaited_until.is_none() && !due.is_empty() {
            state.awaited_until = Some(RealInstant::now() + effort.timeout);
            drop(state);
            let measuring = Measuring(self.0.clone());
            let work = move || measuring.run(of_pod, due, now, effort.limit);
            if let Err(error) = thread::Builder::new().name("logs".to_owned()).spawn(work) {
                tracing::warn!(%error, "cannot start a thread to measure the logs of pods");
            }
            state = self.0.await_thread();
        }
        let files = |pod: &&PodRef| Some((pod.uid.clone(), state.known.get(&pod.uid)?.1.clone()));
        let files: HashMap<_, _> = wanted.iter().filter_map(files).collect();
        let is_late = state.awaited_until.is_some() || files.len() < wanted.len();
        Found { files, is_late }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end of the thread that measures, if there is one.
    fn await_thread(&self) -> MutexGuard<'_, State> {
        let state = self.lock();
        let now = RealInstant::now();
        let left = state.awaited_until.unwrap_or(now).saturating_duration_since(now);
        let waited = self.ended.wait_timeout_while(state, left, |state| state.awaited_until.is_some());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state
    }
}

/// A thread measures, until this is dropped.
struct Measuring(Arc<Shared>);

impl Measuring {
    fn run(&self, of_pod: impl Fn(&PodRef) -> PodFiles, due: Due, now: Instant, limit: Duration) {
        let began = RealInstant::now();
        for (is_known, pod) in due {
            // Those without an older result come first.
            if is_known && began.elapsed() > limit {
                break;
            }
            let files = of_pod(&pod);
            self.0.lock().known.insert(pod.uid, (now, files));
        }
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        self.0.lock().awaited_until = None;
        self.0.ended.notify_all();
    }
}

impl State {
    /// Those of the wanted pods that have no result of this age, that with the oldest one first.
    fn due(&mut self, pods: &[PodRef], wanted: &[&PodRef], now: Instant, max_age: Duration) -> Due {
        let present: HashSet<&PodUid> = pods.iter().map(|pod| &pod.uid).collect();
        self.known.retain(|uid, _| present.contains(uid));
        let known_at = |pod: &PodRef| self.known.get(&pod.uid).map(|(at, _)| *at);
        let mut order: Vec<(Option<Instant>, &PodRef)> = wanted.iter().map(|pod| (known_at(pod), *pod)).collect();
        order.retain(|(at, _)| at.is_none_or(|at| now.saturating_duration_since(at) >= max_age));
        order.sort_by_key(|(at, _)| *at);
        order.into_iter().map(|(at, pod)| (at.is_some(), pod.clone())).collect()
    }
}

fn of_pod(folders: &Folders, pod: &PodRef) -> PodFiles {
    let folder = folders.pod_logs.join(pod.log_dir_name());
    let hosts = folders.root.join("pods").join(pod.uid.as_str()).join("etc-hosts");
    let mut files = PodFiles { other: file(&hosts), logs: HashMap::new() };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten().take(LONGEST_LISTING) {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files.logs.insert(entry.file_name().to_string_lossy().into_owned(), of_container(&entry.path()));
        } else {
            files.other = files.other + file(&entry.path());
        }
    }
    files
}

/// The files in a container's log folder, without the folder itself, as upstream; the runtime makes no folders there.
fn of_container(folder: &Path) -> FsUsage {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(LONGEST_LISTING);
    let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    files.fold(FsUsage::default(), |sum, entry| sum + file(&entry.path()))
}

fn file(path: &Path) -> FsUsage {
    fs::symlink_metadata(path).map(|meta| FsUsage { bytes: meta.blocks() * 512, inodes: 1 }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn pod(name: &str) -> PodRef {
        PodRef { uid: format!("{name}-uid").as_str().into(), namespace: "ns".into(), name: name.into() }
    }

    #[tokio::test(start_paused = true)]
    async fn logs_and_other_files_are_measured_again_when_they_are_old() {
        let dir = tempfile::tempdir().unwrap();
        let folders = Folders { root: dir.path().to_owned(), pod_logs: dir.path().join("logs") };
        let logs = folders.pod_logs.join(pod("a").log_dir_name());
        fs::create_dir_all(logs.join("main/deeper")).unwrap();
        fs::create_dir_all(dir.path().join("pods/a-uid")).unwrap();
        let write = |path: &Path| fs::write(path, vec![7; 100_000]).unwrap();
        write(&logs.join("main/0.log"));
        write(&logs.join("main/deeper/not-a-log"));
        write(&logs.join("loose"));
        write(&dir.path().join("pods/a-uid/etc-hosts"));
        let files = Files::default();
        let found = files.measure(&folders, &[pod("a"), pod("b")], |_| true, Effort::SCRAPE).files;
        let of_a = &found[&pod("a").uid];
        assert_eq!((of_a.logs["main"].inodes, of_a.other.inodes), (1, 2), "the log, not its folder; two other files");
        assert!(of_a.logs["main"].bytes >= 98_304 && of_a.other.bytes >= 196_608, "{of_a:?}");
        assert_eq!(found[&pod("b").uid], PodFiles::default());

        write(&logs.join("main/1.log"));
        let of_a = |effort| files.measure(&folders, &[pod("a")], |_| true, effort).files;
        let inodes = |effort| of_a(effort)[&pod("a").uid].logs["main"].inodes;
        assert_eq!(inodes(Effort::SCRAPE), 1, "measured a moment ago");
        assert_eq!(files.0.lock().known.len(), 1, "a pod that is gone is dropped");
        assert_eq!(inodes(Effort::NOW), 2);
        write(&logs.join("main/2.log"));
        tokio::time::advance(Effort::SCRAPE.max_age).await;
        assert_eq!(inodes(Effort { limit: Duration::ZERO, ..Effort::SCRAPE }), 2, "no time is left");
        assert_eq!(inodes(Effort::SCRAPE), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn files_of_pods_that_are_not_requested_are_neither_measured_nor_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let folders = Folders { root: dir.path().to_owned(), pod_logs: dir.path().join("logs") };
        let write = |name: &str, file: &str| {
            let logs = folders.pod_logs.join(pod(name).log_dir_name()).join("main");
            fs::create_dir_all(&logs).unwrap();
            fs::write(logs.join(file), "7").unwrap();
        };
        let (pods, a) = ([pod("a"), pod("b")], pod("a").uid);
        for name in ["a", "b"] {
            write(name, "0.log");
        }
        let files = Files::default();
        files.measure(&folders, &pods, |_| true, Effort::NOW);
        for name in ["a", "b"] {
            write(name, "1.log");
        }
        let found = files.measure(&folders, &pods, |uid| *uid == a, Effort::NOW).files;
        assert_eq!((found.len(), found[&a].logs["main"].inodes), (1, 2), "both logs");
        let known = files.measure(&folders, &pods, |_| true, Effort::SCRAPE).files;
        assert_eq!(known[&pod("b").uid].logs["main"].inodes, 1, "it is known from before");
        files.measure(&folders, &[pod("b"), pod("c")], |_| false, Effort::NOW);
        let state = files.0.lock();
        assert_eq!(state.known.keys().collect::<Vec<_>>(), [&pod("b").uid], "a pod that is gone is dropped");
    }

    #[test]
    fn a_folder_that_hangs_keeps_one_thread_and_no_reader() {
        let (started, starts) = mpsc::channel();
        let (finish, finished) = mpsc::channel::<()>();
        let (files, finished) = (Files::default(), Arc::new(Mutex::new(finished)));
        let known = |pods: &[PodRef], timeout| {
            let (started, finished) = (started.clone(), finished.clone());
            let of_pod = move |pod: &PodRef| {
                // Fails if the test has ended.
                let _ = started.send(pod.name.to_string());
                if pod.name.starts_with("hangs") {
                    // Until the other end is dropped.
                    let _ = finished.lock().unwrap().recv();
                }
                PodFiles::default()
            };
            let found = files.measure_by(of_pod, pods, |_| true, Effort { timeout, ..Effort::NOW });
            (pods.iter().map(|pod| found.files.contains_key(&pod.uid)).collect::<Vec<_>>(), found.is_late)
        };
        let pods = [pod("hangs"), pod("other")];
        assert_eq!(known(&pods[1..], TIMEOUT), (vec![true], false));
        assert_eq!(known(&pods, Duration::ZERO), (vec![false, true], true), "it waits no longer than the timeout");
        assert_eq!(starts.iter().take(2).collect::<Vec<_>>(), ["other", "hangs"]);
        let began = RealInstant::now();
        assert_eq!(known(&pods, TIMEOUT), (vec![false, true], true));
        assert!(began.elapsed() < TIMEOUT, "the folder that hangs is not waited for again");
        assert!(starts.try_recv().is_err(), "no other thread is kept");
        drop(finish);
        while known(&pods, TIMEOUT) != (vec![true, true], false) {
            thread::yield_now();
        }
    }
}
