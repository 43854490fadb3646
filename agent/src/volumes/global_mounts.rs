//! Global mounts: a device is mounted once for the node, and bind mounted for each pod that uses it (upstream: `MountDevice`
//! and the attached volumes of the actual state).
//!
//! ```text
//!  <root>/plugins/kubernetes.io/local-volume/mounts/<persistent volume>                             see `claims/local.rs`
//!  <root>/plugins/kubernetes.io/iscsi/iface-<interface>/<portal>-<target>-lun-<unit>                see `iscsi`
//!  <root>/plugins/kubernetes.io/iscsi/volumeDevices/iface-<interface>/<portal>-<target>-lun-<unit>
//!  <root>/plugins/kubernetes.io/fc/{<target>-lun-<unit>,<identifier>}                               see `fc`
//!  <root>/plugins/kubernetes.io/fc/volumeDevices/{<target>-lun-<unit>,<identifier>}
//!  <root>/plugins/kubernetes.io/flexvolume/<vendor>/<driver>/mounts/<volume>                       see `flex_volume`
//! ```
//!
//! Which pods use one is read from the table of mounts, so that a new agent has it too. A pod that is about to use one
//! is registered before: its mount is not there yet.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::collections::HashSet;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use tokio::sync::Notify;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;
use tokio::time::timeout_at;

use super::PodDirs;
use super::VolumeError;
use super::error::OnPath as _;
use super::plugin::SET_UP_TIMEOUT;
use crate::filesystem;
use crate::filesystem::MountTable;

/// Places of global mounts and the pods that use them. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct GlobalMounts {
    dirs: PodDirs,
    users: Arc<Mutex<HashMap<String, BTreeSet<PathBuf>>>>,
    /// Where [`Self::carry_out`] works.
    working: Arc<Mutex<HashSet<PathBuf>>>,
    locks: Locks,
    released: Arc<Notify>,
}

impl GlobalMounts {
    pub(super) fn new(dirs: PodDirs) -> Self {
        let (working, locks, released) = (Arc::default(), Locks::default(), Arc::default());
        Self { dirs, users: Arc::default(), working, locks, released }
    }

    fn users(&self) -> MutexGuard<'_, HashMap<String, BTreeSet<PathBuf>>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn working(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        self.working.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pod is about to use the mount.
    pub(super) fn register(&self, uid: &str, place: &Path) {
        self.users().entry(uid.to_owned()).or_default().insert(place.to_owned());
    }

    /// The pod is over. What it has mounted is still in use.
    pub(super) fn forget(&self, uid: &str) {
        self.users().remove(uid);
    }

    /// Places that pods of this agent use or are about to use, and those where [`Self::carry_out`] works: it may be attaching
    /// a device for a pod that is over, and has no directory of its own yet.
    pub(super) fn registered(&self) -> HashSet<PathBuf> {
        let mut all = self.working().clone();
        all.extend(self.users().values().flatten().cloned());
        all
    }

    /// True if it is one of [`Self::registered`].
    pub(super) fn is_registered(&self, place: &Path) -> bool {
        self.working().contains(place) || self.users().values().any(|places| places.contains(place))
    }

    /// True if some pod has the file system that is mounted at this place. Blocking.
    ///
    /// # Errors
    /// The table of mounts cannot be read.
    pub(super) fn is_mounted_for_a_pod(&self, place: &Path) -> Result<bool, VolumeError> {
        let table = MountTable::read().on("read the table of mounts for", place)?;
        // The way to the directory is the operator's and may have links, which the table has not.
        let resolved = |path: PathBuf| path.canonicalize().unwrap_or(path);
        Ok(table.is_mounted_below(&resolved(place.to_owned()), &resolved(self.dirs.pods())))
    }

    /// Waits until nothing else is done at this place.
    pub(super) async fn lock(&self, place: &Path) -> OwnedMutexGuard<()> {
        self.locks.lock(&place.to_string_lossy()).await
    }

    /// The lock of this place, unless [`Self::carry_out`] works there: that may take long, and is announced at its end if no
    /// pod is registered any more.
    pub(super) fn try_lock(&self, place: &Path) -> Option<OwnedMutexGuard<()>> {
        self.locks.try_lock(&place.to_string_lossy())
    }

    /// Does work at this place that must not be interrupted: it goes on if the caller gives up, and the place is in use until
    /// it ends.
    ///
    /// # Errors
    /// Those of `work`; it, or what was begun before, takes too long.
    pub(super) async fn carry_out<T: Send + 'static>(
        &self,
        place: &Path,
        work: impl Future<Output = Result<T, VolumeError>> + Send + 'static,
    ) -> Result<T, VolumeError> {
        let deadline = Instant::now() + SET_UP_TIMEOUT;
        let held = timeout_at(deadline, self.lock(place)).await;
        let held = held.map_err(|_| VolumeError::GoesOn(SET_UP_TIMEOUT))?;
        let (own, of) = (self.clone(), place.to_owned());
        let working = Working::begin(&self.working, place, held);
        let running = tokio::spawn(async move {
            let done = work.await;
            drop(working);
            if !own.is_registered(&of) {
                // The pod has gone meanwhile.
                own.announce();
            }
            done
        });
        match timeout_at(deadline, running).await {
            Ok(Ok(done)) => done,
            Ok(Err(error)) => Err(VolumeError::Interrupted(error.to_string())),
            Err(_) => Err(VolumeError::GoesOn(SET_UP_TIMEOUT)),
        }
    }

    /// True if no pod uses the mount, or is about to. Blocking.
    ///
    /// # Errors
    /// The table of mounts cannot be read.
    pub(super) fn is_unused(&self, place: &Path) -> Result<bool, VolumeError> {
        Ok(!self.is_registered(place) && !self.is_mounted_for_a_pod(place)?)
    }

    /// Unmounts what no pod uses. False if some pod does; the lock of the place is held. Blocking.
    ///
    /// # Errors
    /// The mount is in use otherwise, or the table of mounts cannot be read.
    pub(super) fn unmount_unused(&self, place: &Path) -> Result<bool, VolumeError> {
        while filesystem::is_mount_point(place).on("inspect", place)? {
            if !self.is_unused(place)? {
                return Ok(false);
            }
            filesystem::unmount_flushed(place).on("unmount", place)?;
        }
        Ok(!self.is_registered(place))
    }

    /// Some mount may have lost its last user.
    pub(super) fn announce(&self) {
        self.released.notify_one();
    }

    /// Waits for the next [`Self::announce`], unless there was one since the last time.
    pub(super) async fn announced(&self) {
        self.released.notified().await;
    }
}

/// Work at a place, which ends when this is dropped.
struct Working {
    all: Arc<Mutex<HashSet<PathBuf>>>,
    place: PathBuf,
    /// The lock of the place.
    _held: OwnedMutexGuard<()>,
}

impl Working {
    fn begin(all: &Arc<Mutex<HashSet<PathBuf>>>, place: &Path, held: OwnedMutexGuard<()>) -> Self {
        all.lock().unwrap_or_else(PoisonError::into_inner).insert(place.to_owned());
        Self { all: all.clone(), place: place.to_owned(), _held: held }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        // With the lock, which is released after this: the entry of the next work stays.
        self.all.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.place);
    }
}

/// Locks by key; one exists while a task holds it or waits for it. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Locks(Arc<Mutex<HashMap<String, std::sync::Weak<tokio::sync::Mutex<()>>>>>);

impl Locks {
    /// Acquires the lock of `key`. Cancel-safe.
    pub(super) async fn lock(&self, key: &str) -> OwnedMutexGuard<()> {
        self.of(key).lock_owned().await
    }

    /// The lock of `key`, unless a task holds it.
    pub(super) fn try_lock(&self, key: &str) -> Option<OwnedMutexGuard<()>> {
        self.of(key).try_lock_owned().ok()
    }

    fn of(&self, key: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, lock| lock.strong_count() > 0);
        let held = all.get(key).and_then(std::sync::Weak::upgrade);
        held.unwrap_or_else(|| {
            let lock = Arc::new(tokio::sync::Mutex::new(()));
            all.insert(key.to_owned(), Arc::downgrade(&lock));
            lock
        })
    }
}

#[cfg(test)]
mod tests {
    use keblet_skip::mounts::bind;
    use keblet_skip::mounts::in_private_mounts;
    use keblet_skip::mounts::tmpfs;

    use super::*;

    #[tokio::test]
    async fn a_lock_is_held_by_one_task_and_removed_after_the_last() {
        let locks = Locks::default();
        let first = locks.lock("a").await;
        let other = locks.lock("b").await;
        let (waiting, of) = (locks.clone(), Arc::new(Notify::new()));
        let reached = of.clone();
        let second = tokio::spawn(async move {
            let _held = waiting.lock("a").await;
            reached.notify_one();
        });
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        drop((first, other));
        of.notified().await;
        second.await.expect("no panic");
        drop(locks.lock("c").await);
        assert_eq!(locks.0.lock().expect("unpoisoned").len(), 1, "the one that was asked for last");
    }

    #[test]
    fn the_table_of_mounts_tells_the_pods_of_a_mount() {
        in_private_mounts(|| {
            let root = tempfile::tempdir().expect("a folder");
            let (real, linked) = (root.path().join("real"), root.path().join("linked"));
            std::fs::create_dir(&real).expect("a folder");
            std::os::unix::fs::symlink(&real, &linked).expect("a link");
            let mounts = GlobalMounts::new(PodDirs::new(&linked));
            let place = linked.join("plugins/p/v");
            tmpfs(&place);
            assert!(!mounts.is_mounted_for_a_pod(&place).expect("a table"));
            let target = linked.join("pods/u/volumes/p/v");
            bind(&place, &target);
            assert!(mounts.is_mounted_for_a_pod(&place).expect("a table"));
            let again = GlobalMounts::new(PodDirs::new(&linked));
            assert!(again.is_mounted_for_a_pod(&place).expect("a table"), "a new agent knows it");
            crate::filesystem::unmount(&target).expect("unmounted");
            assert!(!mounts.is_mounted_for_a_pod(&place).expect("a table"));
        });
    }

    #[test]
    fn only_what_no_pod_uses_is_unmounted() {
        in_private_mounts(|| {
            let root = tempfile::tempdir().expect("a folder");
            let mounts = GlobalMounts::new(PodDirs::new(root.path()));
            let (place, target) = (root.path().join("plugins/p/v"), root.path().join("pods/u/volumes/p/v"));
            tmpfs(&place);
            mounts.register("u", &place);
            assert!(!mounts.unmount_unused(&place).expect("asked"), "it is about to be used");
            bind(&place, &target);
            mounts.forget("u");
            assert!(!mounts.unmount_unused(&place).expect("asked"), "it is used");
            crate::filesystem::unmount(&target).expect("unmounted");
            let opened = std::fs::File::open(&place).expect("it is there");
            let error = mounts.unmount_unused(&place).expect_err("it is busy").to_string();
            assert!(error.contains("busy") && filesystem::is_mount_point(&place).expect("it is there"), "{error}");
            drop(opened);
            assert!(mounts.unmount_unused(&place).expect("unmounted"));
            assert!(!filesystem::is_mount_point(&place).expect("it is there"));
        });
    }

    #[tokio::test(start_paused = true)]
    async fn work_goes_on_when_its_caller_gives_up() {
        let mounts = GlobalMounts::new(PodDirs::new(Path::new("/r")));
        let place = Path::new("/r/plugins/p/v");
        mounts.register("u", place);
        let ended = Arc::new(Notify::new());
        let end = ended.clone();
        let work = async move {
            end.notified().await;
            Ok(())
        };
        let error = mounts.carry_out(place, work).await.expect_err("it takes long").to_string();
        assert!(error.ends_with("goes on in the background"), "{error}");
        let next = mounts.carry_out(place, async { Ok(()) }).await.expect_err("the first goes on").to_string();
        assert_eq!(next, error);
        mounts.forget("u");
        assert!(mounts.is_registered(place) && mounts.registered().contains(place), "the device may be attached yet");
        let release = tokio::time::timeout(SET_UP_TIMEOUT, crate::volumes::claims::release(&mounts, place));
        assert!(!release.await.expect("it is not waited for").expect("nothing is done"));
        ended.notify_one();
        mounts.announced().await;
        assert!(!mounts.is_registered(place) && mounts.registered().is_empty());
        mounts.carry_out(place, async { Ok(()) }).await.expect("it has ended");
        let failing = async { Err::<(), _>(VolumeError::InUse("p")) };
        assert!(matches!(mounts.carry_out(place, failing).await, Err(VolumeError::InUse(_))));
    }

    /// Its device may be attached at any moment, and its record is there already.
    #[test]
    fn a_place_that_a_pod_waits_for_is_not_released() {
        let root = tempfile::tempdir().expect("a folder");
        let (mounts, place) = (GlobalMounts::new(PodDirs::new(root.path())), root.path().join("plugins/p/v"));
        std::fs::create_dir_all(&place).expect("folders");
        mounts.register("u", &place);
        assert!(!mounts.is_unused(&place).expect("a table") && !mounts.unmount_unused(&place).expect("asked"));
        mounts.forget("u");
        assert!(mounts.is_unused(&place).expect("a table") && mounts.unmount_unused(&place).expect("asked"));
    }

    #[test]
    fn a_pod_uses_what_it_is_registered_for() {
        let mounts = GlobalMounts::new(PodDirs::new(Path::new("/r")));
        let place = Path::new("/r/plugins/p/v");
        mounts.register("u-1", place);
        mounts.register("u-2", place);
        mounts.forget("u-1");
        assert!(mounts.is_registered(place) && mounts.registered().len() == 1);
        mounts.forget("u-2");
        assert!(!mounts.is_registered(place));
    }
}
