//! User namespaces of pods (KEP-127): which range of the node's user and group ids each pod with `hostUsers: false` has.
//!
//! A range is recorded in a file of the pod's directory before the runtime receives it, in the kubelet's format, and given
//! back only when that file is gone. Whenever a file cannot be read, written or removed, the range stays with its pod: two pods
//! with the same ids could read each other's files.

mod error;
mod files;
mod mapping;
mod node_range;
mod slots;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

pub use error::StartError;
pub use error::UserNamespaceError;
pub use mapping::Mapping;
pub use node_range::IdRange;
pub use node_range::node_range;

use crate::filesystem;
use crate::volumes::PodDirs;
use slots::Slots;

/// The ranges of the node's pods. Clones share them. The default has none: a pod that needs a range fails.
#[derive(Clone, Debug, Default)]
pub struct UserNamespaces(Option<Arc<Ranges>>);

#[derive(Debug)]
struct Ranges {
    dirs: PodDirs,
    /// Locked while a file is read or written, so that memory and disk agree.
    disk: Mutex<()>,
    /// Never locked during calls that may block.
    slots: Mutex<Slots>,
}

impl UserNamespaces {
    /// Reads the ranges of all pods that have a directory. Blocking.
    ///
    /// # Errors
    /// A file that cannot be read, or whose range cannot be given to its pod: the agent must not start, since it could not
    /// determine which ranges are free.
    pub fn open(dirs: PodDirs, range: IdRange) -> Result<Self, StartError> {
        let mut slots = Slots::new(range);
        for uid in files::pods(&dirs)? {
            let recorded = files::read(&dirs, &uid);
            let restored = recorded.and_then(|mapping| mapping.map_or(Ok(()), |mapping| slots.record(&uid, mapping)));
            restored.map_err(|fault| StartError::Record { uid, fault: Box::new(fault) })?;
        }
        Ok(Self(Some(Arc::new(Ranges { dirs, disk: Mutex::default(), slots: Mutex::new(slots) }))))
    }

    /// The range of a pod; a new one, recorded on disk, if it has none. Once begun, it is carried out even if the future is
    /// dropped.
    ///
    /// # Errors
    /// The file cannot be read or written; its content is not possible; all ranges are taken. A pod whose file cannot be
    /// written keeps its range for the next attempt.
    pub async fn of_pod(&self, uid: &str) -> Result<Mapping, UserNamespaceError> {
        self.run(uid, Ranges::of_pod).await
    }

    /// Removes the file of a pod of which no process is left, then frees its range. A pod without a range is no error.
    ///
    /// # Errors
    /// The file cannot be removed; the range stays with the pod.
    pub async fn release(&self, uid: &str) -> Result<(), UserNamespaceError> {
        // Nearly no pod has one: nothing to wait for.
        if self.0.as_ref().is_none_or(|ranges| !ranges.slots().has(uid)) {
            return Ok(());
        }
        self.run(uid, Ranges::release).await
    }

    /// UIDs of the pods that have a range.
    pub fn recorded(&self) -> Vec<String> {
        self.0.as_ref().map(|ranges| ranges.slots().uids()).unwrap_or_default()
    }

    async fn run<T: Send + 'static>(
        &self,
        uid: &str,
        work: fn(&Ranges, &str) -> Result<T, UserNamespaceError>,
    ) -> Result<T, UserNamespaceError> {
        let ranges = self.0.clone().ok_or(UserNamespaceError::NotSetUp)?;
        let uid = uid.to_owned();
        filesystem::blocking(move || Ok(work(&ranges, &uid))).await.map_err(UserNamespaceError::Interrupted)?
    }
}

impl Ranges {
    fn slots(&self) -> MutexGuard<'_, Slots> {
        // No update leaves the slots half changed.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn disk(&self) -> MutexGuard<'_, ()> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file takes precedence over the range in memory.
    fn of_pod(&self, uid: &str) -> Result<Mapping, UserNamespaceError> {
        let _disk = self.disk();
        if let Some(mapping) = files::read(&self.dirs, uid).map_err(UserNamespaceError::in_file)? {
            self.slots().record(uid, mapping).map_err(UserNamespaceError::in_file)?;
            return Ok(mapping);
        }
        let failed = |error| UserNamespaceError::Create(Box::new(error));
        let mapping = self.slots().take(uid).map_err(failed)?;
        files::write(&self.dirs, uid, mapping).map_err(failed)?;
        Ok(mapping)
    }

    fn release(&self, uid: &str) -> Result<(), UserNamespaceError> {
        let _disk = self.disk();
        files::remove(&self.dirs, uid)?;
        self.slots().free(uid);
        Ok(())
    }
}
