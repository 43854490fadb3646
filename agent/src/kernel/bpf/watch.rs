//! Maps of the probes: watched cgroups, counters.

use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use aya::Ebpf;
use aya::Pod;
use aya::maps::HashMap;
use aya::maps::MapData;
use aya::maps::MapError;
use aya::maps::PerCpuArray;
use keblet_ebpf_common::Loss;
use keblet_ebpf_common::WatchedCgroup;
use keblet_ebpf_common::names;
use keblet_ebpf_common::watch;
use thiserror::Error;

use super::CgroupId;
use super::LoadError;
use crate::cgroups::Hierarchy;

/// `BPF_NOEXIST`: leave an entry alone that is there already.
const ONLY_NEW: u64 = 1;

/// A cgroup is not watched.
#[derive(Debug, Error)]
pub enum WatchError {
    /// The map is full.
    #[error("cannot watch cgroup {id}: the map of {limit} entries is full")]
    Full {
        /// The cgroup.
        id: u64,
        /// Size of the map.
        limit: u32,
    },
    /// The system call failed.
    #[error("cannot watch cgroup {id}: {source}")]
    Refused {
        /// The cgroup.
        id: u64,
        /// The cause.
        source: MapError,
    },
    /// A cgroup's directory cannot be read.
    #[error("cannot watch cgroup {path}: {source}")]
    Unreadable {
        /// Path in the hierarchy.
        path: String,
        /// The cause.
        source: io::Error,
    },
}

/// Value of the cgroup map as plain bytes.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Watched(WatchedCgroup);

// SAFETY: integers only, without padding.
unsafe impl Pod for Watched {}

/// Losses since the probes were loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Exit and OOM records.
    pub exits: u64,
    /// Cgroup records.
    pub cgroups: u64,
    /// New cgroups that are not watched.
    pub watches: u64,
}

/// Direct memory reclaim by processes of a cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Number of times that a process had to reclaim memory itself.
    pub count: u64,
    /// How long in all.
    pub time: Duration,
}

/// The loaded probes. Cheap to clone; each call is a few short system calls.
#[derive(Clone)]
pub struct Probes {
    shared: Arc<Shared>,
}

struct Shared {
    cgroups: Mutex<HashMap<MapData, u64, Watched>>,
    drops: PerCpuArray<MapData, u64>,
    /// Programs and their links, attached until this is dropped.
    _ebpf: Ebpf,
}

impl Probes {
    pub(super) fn new(mut ebpf: Ebpf) -> Result<Self, LoadError> {
        let mut take =
            |name: &str| ebpf.take_map(name).ok_or_else(|| LoadError::Object(format!("it has no map {name}")));
        let bad = |name: &str, error: MapError| LoadError::Object(format!("map {name}: {error}"));
        let cgroups = HashMap::try_from(take(names::WATCHED_CGROUPS)?).map_err(|e| bad(names::WATCHED_CGROUPS, e))?;
        let drops = PerCpuArray::try_from(take(names::DROPS)?).map_err(|e| bad(names::DROPS, e))?;
        let shared = Shared { cgroups: Mutex::new(cgroups), drops, _ebpf: ebpf };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Watches a cgroup: exits of inits of PID namespaces and OOM victims in it, reclaim stalls, and the cgroups created
    /// below it, which are then watched alike. With `all_exits` every exit in it (not below it) is reported.
    ///
    /// # Errors
    /// The map is full, or the system call failed.
    pub fn watch_cgroup(&self, id: CgroupId, all_exits: bool) -> Result<(), WatchError> {
        let flags = if all_exits { watch::ALL_EXITS } else { 0 };
        self.insert(id, flags, 0)
    }

    /// No longer watches a cgroup; its descendants stay watched. No error if it is not watched.
    pub fn unwatch_cgroup(&self, id: CgroupId) {
        let mut cgroups = self.shared.cgroups.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = cgroups.remove(&id.0);
    }

    /// Watches the cgroup at `path` and its descendants. Returns them with their paths: one created meanwhile is reported
    /// by a record, or found here, or both.
    ///
    /// # Errors
    /// The map is full, the system call failed, or a directory is not readable.
    pub fn watch_tree(&self, hierarchy: &Hierarchy, path: &str) -> Result<Vec<(CgroupId, String)>, WatchError> {
        let unreadable = |source| WatchError::Unreadable { path: path.to_owned(), source };
        let mut found = vec![(hierarchy.id_of(path).map_err(unreadable)?, path.to_owned())];
        let mut next = 0;
        while let Some((id, path)) = found.get(next).cloned() {
            // First watch, then list: a child created in between inherits.
            match self.insert(id, 0, ONLY_NEW) {
                Err(WatchError::Refused { source, .. }) if is_errno(&source, libc::EEXIST) => {}
                other => other?,
            }
            found.extend(hierarchy.children(&path));
            next += 1;
        }
        Ok(found)
    }

    fn insert(&self, id: CgroupId, flags: u32, mode: u64) -> Result<(), WatchError> {
        let value = Watched(WatchedCgroup { flags, ..WatchedCgroup::default() });
        let mut cgroups = self.shared.cgroups.lock().unwrap_or_else(PoisonError::into_inner);
        cgroups.insert(id.0, value, mode).map_err(|source| full_or_refused(id, source))
    }

    /// Whether a cgroup is watched, by the agent or through its parent.
    pub fn watches_cgroup(&self, id: CgroupId) -> bool {
        let cgroups = self.shared.cgroups.lock().unwrap_or_else(PoisonError::into_inner);
        cgroups.get(&id.0, 0).is_ok()
    }

    /// Reclaim stalls of a cgroup since it is watched.
    pub fn stalls(&self, id: CgroupId) -> Option<Stalls> {
        let cgroups = self.shared.cgroups.lock().unwrap_or_else(PoisonError::into_inner);
        let Watched(value) = cgroups.get(&id.0, 0).ok()?;
        Some(Stalls { count: value.stalls, time: Duration::from_nanos(value.stall_ns) })
    }

    /// Losses since the probes were loaded.
    pub fn losses(&self) -> Losses {
        let count = |what: Loss| {
            let values = self.shared.drops.get(&(what as u32), 0);
            values.map_or(0, |values| values.iter().sum())
        };
        Losses { exits: count(Loss::Exits), cgroups: count(Loss::Cgroups), watches: count(Loss::Watches) }
    }
}

/// Size of the map of cgroups, as defined by the probes.
const MAX_CGROUPS: u32 = 8192;

fn full_or_refused(CgroupId(id): CgroupId, source: MapError) -> WatchError {
    if is_errno(&source, libc::E2BIG) {
        WatchError::Full { id, limit: MAX_CGROUPS }
    } else {
        WatchError::Refused { id, source }
    }
}

fn is_errno(error: &MapError, errno: i32) -> bool {
    matches!(error, MapError::SyscallError(call) if call.io_error.raw_os_error() == Some(errno))
}
