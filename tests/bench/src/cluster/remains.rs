//! When the sandboxes and cgroups of pods are removed, found by polling, independently of the participant.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use keblet::runtime::Runtime;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::runtime_pods;
use crate::stamps::monotonic_now;

/// Poll interval: the resolution of the times. A poll costs the runtime a list call.
const POLL: Duration = Duration::from_millis(200);
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";
/// Folders of pods below the node's cgroup.
const QOS_FOLDERS: [&str; 3] = ["kubepods", "kubepods/burstable", "kubepods/besteffort"];

/// State of each observed pod UID: `None` while the object exists, else the time when it was found removed.
#[derive(Clone, Debug, Default)]
struct Removals(BTreeMap<String, Option<u64>>);

impl Removals {
    fn update(&mut self, present: &BTreeSet<String>, now: u64) {
        for (uid, removed) in &mut self.0 {
            if present.contains(uid) {
                *removed = None;
            } else {
                removed.get_or_insert(now);
            }
        }
        for uid in present {
            self.0.entry(uid.clone()).or_insert(None);
        }
    }

    /// 0 for a pod that was never observed: it was removed before the next poll.
    fn removed(&self, uid: &str) -> Option<u64> {
        self.0.get(uid).copied().unwrap_or(Some(0))
    }
}

/// When sandboxes and cgroups were removed; nanoseconds of CLOCK_MONOTONIC, late by at most one poll.
#[derive(Clone, Debug, Default)]
pub(super) struct Removed {
    sandboxes: Removals,
    cgroups: Removals,
}

impl Removed {
    /// `None` while the pod has a sandbox.
    pub(super) fn sandbox(&self, uid: &str) -> Option<u64> {
        self.sandboxes.removed(uid)
    }

    /// `None` while the pod has a cgroup.
    pub(super) fn cgroup(&self, uid: &str) -> Option<u64> {
        self.cgroups.removed(uid)
    }

    /// Number of the pods that still have a sandbox or a cgroup.
    pub(super) fn remaining(&self, uids: &[String]) -> usize {
        uids.iter().filter(|uid| self.sandbox(uid).is_none() || self.cgroup(uid).is_none()).count()
    }
}

/// Polls sandboxes and cgroups until it is dropped.
pub(super) struct Remains {
    removed: Arc<Mutex<Removed>>,
    _polling: AbortOnDropHandle<()>,
}

impl Remains {
    /// Starts to poll. Cgroups are searched below `cgroup_root`, if given.
    pub(super) fn watch(runtime: Runtime, cgroup_root: Option<String>) -> Self {
        let removed = Arc::new(Mutex::new(Removed::default()));
        let shared = removed.clone();
        let polling = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(POLL);
            loop {
                ticks.tick().await;
                let sandboxes = runtime_pods::uids(&runtime).await;
                let Ok(now) = monotonic_now() else { return };
                let cgroups = cgroup_root.as_deref().map(cgroup_uids).unwrap_or_default();
                let mut removed = lock(&shared);
                match sandboxes {
                    Ok(sandboxes) => removed.sandboxes.update(&sandboxes, now),
                    Err(error) => tracing::warn!(%error, "cannot poll the sandboxes"),
                }
                removed.cgroups.update(&cgroups, now);
            }
        });
        Self { removed, _polling: AbortOnDropHandle::new(polling) }
    }

    /// Waits until sandboxes and cgroups of the pods are removed, at most for `limit`, and returns the times.
    pub(super) async fn until_removed(&self, uids: &[String], limit: Duration) -> Removed {
        let deadline = Instant::now() + limit;
        loop {
            let removed = lock(&self.removed).clone();
            if removed.remaining(uids) == 0 || Instant::now() > deadline {
                return removed;
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

fn lock(removed: &Mutex<Removed>) -> MutexGuard<'_, Removed> {
    // Entries are replaced as a whole: they stay consistent after a panic.
    removed.lock().unwrap_or_else(PoisonError::into_inner)
}

/// UIDs of the pods that have a cgroup below `root`.
fn cgroup_uids(root: &str) -> BTreeSet<String> {
    let mount = Path::new(CGROUP_MOUNT);
    let root = root.trim_start_matches('/');
    // Agents create the same folders in each hierarchy of cgroup v1.
    let hierarchies: [PathBuf; 2] = [mount.join("memory"), mount.to_owned()];
    let found = hierarchies.into_iter().map(|hierarchy| hierarchy.join(root)).find(|folder| folder.is_dir());
    found.map(|folder| pod_folders(&folder)).unwrap_or_default()
}

fn pod_folders(node: &Path) -> BTreeSet<String> {
    let mut uids = BTreeSet::new();
    for folder in QOS_FOLDERS {
        let Ok(entries) = std::fs::read_dir(node.join(folder)) else { continue };
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        uids.extend(names.filter_map(|name| name.strip_prefix("pod").map(str::to_owned)));
    }
    uids
}

/// Removes the pods' empty cgroups below `root` in all hierarchies: bare clients leave them, and the next agent starts
/// on a clean node.
pub(super) fn remove_cgroups(root: &str) {
    let mount = Path::new(CGROUP_MOUNT);
    let entries = std::fs::read_dir(mount).into_iter().flatten().flatten().map(|entry| entry.path());
    for hierarchy in entries.chain([mount.to_owned()]) {
        remove_empty(&hierarchy.join(root.trim_start_matches('/')).join(QOS_FOLDERS[0]));
    }
}

fn remove_empty(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .for_each(|entry| remove_empty(&entry.path()));
    // A cgroup with processes remains, and one that does not exist needs no removal.
    let _ = std::fs::remove_dir(folder);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(uids: &[&str]) -> BTreeSet<String> {
        uids.iter().map(|uid| (*uid).to_owned()).collect()
    }

    #[test]
    fn the_first_poll_without_a_pod_counts_unless_it_comes_back() {
        let mut removals = Removals::default();
        removals.update(&set(&["a", "b"]), 1);
        removals.update(&set(&["b"]), 2);
        removals.update(&set(&[]), 3);
        removals.update(&set(&["b"]), 4);
        assert_eq!((removals.removed("a"), removals.removed("b"), removals.removed("never")), (Some(2), None, Some(0)));
        removals.update(&set(&[]), 5);
        let removed = Removed { sandboxes: removals, cgroups: Removals::default() };
        assert_eq!((removed.sandbox("b"), removed.remaining(&["a".to_owned(), "b".to_owned()])), (Some(5), 0));
    }

    #[test]
    fn pod_cgroups_of_all_classes_are_found() {
        let node = tempfile::tempdir().unwrap();
        for folder in ["kubepods/poda", "kubepods/burstable/podb", "kubepods/besteffort/podc", "kubepods/other"] {
            std::fs::create_dir_all(node.path().join(folder)).unwrap();
        }
        assert_eq!(pod_folders(node.path()), set(&["a", "b", "c"]));
        remove_empty(&node.path().join("kubepods"));
        assert!(!node.path().join("kubepods").exists());
    }
}
