//! Logs and other files of pods outside their volumes: one folder for each container, written by the runtime. Measured when
//! asked for, kept for a while, and within a time limit: those that were measured longest ago come first. Blocks.

use std::collections::HashMap;
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::Folders;
use super::Used;
use crate::model::PodRef;
use crate::model::PodUid;

/// Files of a log folder that are looked at: the runtime and the rotation of logs keep a handful.
const LONGEST_LISTING: usize = 1000;

/// Files of one pod outside its volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PodFiles {
    /// Logs by container.
    pub(super) logs: HashMap<String, Used>,
    /// Other files of the pod: in its log folder, and its hosts file.
    pub(super) other: Used,
}

/// How fresh results must be, and how long measuring may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// Results of this age are used again.
    pub(super) max_age: Duration,
    /// After this time the older results are used; pods without one are measured in any case.
    pub(super) limit: Duration,
}

impl Effort {
    /// For a request of a monitoring system.
    pub(super) const SCRAPE: Self = Self { max_age: Duration::from_secs(10), limit: Duration::from_millis(5) };
    /// For an eviction.
    pub(super) const NOW: Self = Self { max_age: Duration::ZERO, limit: Duration::from_secs(1) };
}

/// The files of all pods, as far as they were measured.
#[derive(Debug, Default)]
pub(super) struct Files(HashMap<PodUid, (Instant, PodFiles)>);

impl Files {
    /// The files of the wanted ones of these pods. What is known of the others stays; of pods that are not among these it is
    /// dropped.
    pub(super) fn measure(
        &mut self,
        folders: &Folders,
        pods: &[PodRef],
        wanted: impl Fn(&PodUid) -> bool,
        effort: Effort,
    ) -> HashMap<PodUid, PodFiles> {
        let (now, began) = (Instant::now(), std::time::Instant::now());
        let present: HashSet<&PodUid> = pods.iter().map(|pod| &pod.uid).collect();
        self.0.retain(|uid, _| present.contains(uid));
        let wanted = pods.iter().filter(|pod| wanted(&pod.uid));
        let mut order: Vec<(Option<Instant>, &PodRef)> =
            wanted.map(|pod| (self.0.get(&pod.uid).map(|(at, _)| *at), pod)).collect();
        order.sort_by_key(|(at, _)| *at);
        for &(measured_at, pod) in &order {
            let is_fresh = measured_at.is_some_and(|at| now.saturating_duration_since(at) < effort.max_age);
            let is_late = measured_at.is_some() && began.elapsed() > effort.limit;
            if !is_fresh && !is_late {
                self.0.insert(pod.uid.clone(), (now, of_pod(folders, pod)));
            }
        }
        let files = |(_, pod): (_, &PodRef)| Some((pod.uid.clone(), self.0.get(&pod.uid)?.1.clone()));
        order.into_iter().filter_map(files).collect()
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

/// A container's log folder and the files in it; the runtime makes no folders there.
fn of_container(folder: &Path) -> Used {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(LONGEST_LISTING);
    let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    files.fold(file(folder), |sum, entry| sum + file(&entry.path()))
}

fn file(path: &Path) -> Used {
    fs::symlink_metadata(path).map(|meta| Used { bytes: meta.blocks() * 512, inodes: 1 }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
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
        let mut files = Files::default();
        let found = files.measure(&folders, &[pod("a"), pod("b")], |_| true, Effort::SCRAPE);
        let of_a = &found[&pod("a").uid];
        assert_eq!((of_a.logs["main"].inodes, of_a.other.inodes), (2, 2), "the folder and its log; two other files");
        assert!(of_a.logs["main"].bytes >= 98_304 && of_a.other.bytes >= 196_608, "{of_a:?}");
        assert_eq!(found[&pod("b").uid], PodFiles::default());

        write(&logs.join("main/1.log"));
        let inodes = |files: &mut Files, effort| {
            files.measure(&folders, &[pod("a")], |_| true, effort)[&pod("a").uid].logs["main"].inodes
        };
        assert_eq!(inodes(&mut files, Effort::SCRAPE), 2, "measured a moment ago");
        assert_eq!(files.0.len(), 1, "a pod that is gone is dropped");
        assert_eq!(inodes(&mut files, Effort::NOW), 3);
        write(&logs.join("main/2.log"));
        tokio::time::advance(Effort::SCRAPE.max_age).await;
        assert_eq!(inodes(&mut files, Effort { limit: Duration::ZERO, ..Effort::SCRAPE }), 3, "no time is left");
        assert_eq!(inodes(&mut files, Effort::SCRAPE), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn files_of_pods_that_are_not_wanted_are_neither_measured_nor_forgotten() {
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
        let mut files = Files::default();
        files.measure(&folders, &pods, |_| true, Effort::NOW);
        for name in ["a", "b"] {
            write(name, "1.log");
        }
        let found = files.measure(&folders, &pods, |uid| *uid == a, Effort::NOW);
        assert_eq!((found.len(), found[&a].logs["main"].inodes), (1, 3), "the folder and two logs");
        let known = files.measure(&folders, &pods, |_| true, Effort::SCRAPE);
        assert_eq!(known[&pod("b").uid].logs["main"].inodes, 2, "it is known from before");
        files.measure(&folders, &[pod("b"), pod("c")], |_| false, Effort::NOW);
        assert_eq!(files.0.keys().collect::<Vec<_>>(), [&pod("b").uid], "a pod that is gone is dropped");
    }
}
