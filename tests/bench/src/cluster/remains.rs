//! When the sandboxes and cgroups of pods are removed, found by polling: no participant can be asked.

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

/// Resolution of the times, and what it costs the runtime: a list call.
const POLL: Duration = Duration::from_millis(200);
const CGROUP_MOUNT: &str = "/sys/fs/cgroup";
/// Folders of pods below the node's cgroup.
const QOS_FOLDERS: [&str; 3] = ["kubepods", "kubepods/burstable", "kubepods/besteffort"];

/// What has been seen of each pod UID: `None` while it is there, else when it was found removed.
#[derive(Clone, Debug, Default)]
struct Seen(BTreeMap<String, Option<u64>>);

impl Seen {
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

    /// 0 for a pod that was never seen: it was removed before the next poll.
    fn removed(&self, uid: &str) -> Option<u64> {
        self.0.get(uid).copied().unwrap_or(Some(0))
    }
}

/// When sandboxes and cgroups were removed; nanoseconds of CLOCK_MONOTONIC, late by one poll at most.
#[derive(Clone, Debug, Default)]
pub(super) struct Removed {
    sandboxes: Seen,
    cgroups: Seen,
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

    /// How many of the pods still have a sandbox or a cgroup.
    pub(super) fn remaining(&self, uids: &[String]) -> usize {
        uids.iter().filter(|uid| self.sandbox(uid).is_none() || self.cgroup(uid).is_none()).count()
    }
}

/// A running watch of sandboxes and cgroups; ends when it is dropped.
pub(super) struct Remains {
    removed: Arc<Mutex<Removed>>,
    _polling: AbortOnDropHandle<()>,
}

impl Remains {
    /// Begins to poll. Cgroups are looked for below `cgroup_root`, if there is one.
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

    /// Waits until nothing is left of the pods, for `limit` at most, and returns what is known then.
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
    // Each entry is changed at once: a panic elsewhere leaves it usable.
    removed.lock().unwrap_or_else(PoisonError::into_inner)
}

/// UIDs of the pods that have a cgroup below `root`.
fn cgroup_uids(root: &str) -> BTreeSet<String> {
    let mount = Path::new(CGROUP_MOUNT);
    let root = root.trim_start_matches('/');
    // Agents keep the same folders in each hierarchy of cgroup v1.
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

/// Removes the pods' cgroups below `root` in all hierarchies, as far as they are empty: bare clients leave them, and the
/// next agent starts on a clean node.
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
    // A cgroup with processes stays, and one that does not exist needs nothing.
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
        let mut seen = Seen::default();
        seen.update(&set(&["a", "b"]), 1);
        seen.update(&set(&["b"]), 2);
        seen.update(&set(&[]), 3);
        seen.update(&set(&["b"]), 4);
        assert_eq!((seen.removed("a"), seen.removed("b"), seen.removed("never")), (Some(2), None, Some(0)));
        seen.update(&set(&[]), 5);
        let removed = Removed { sandboxes: seen, cgroups: Seen::default() };
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
