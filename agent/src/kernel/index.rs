//! Which container a pid or a cgroup belongs to.
//!
//! Owns the one mapping from the kernel's names (cgroup id, pid) to the runtime's (container or sandbox id). Fed from
//! two sides: cgroup events and directory walks bring ids with paths, and the runtime's status brings pids. Pure: reads
//! no file and no clock. Refuses to guess: a cgroup whose name holds no id, and whose ancestors hold none, belongs to
//! nobody.

use std::collections::HashMap;

use super::bpf::CgroupId;
use crate::model::ContainerId;

/// The mapping.
#[derive(Debug, Default)]
pub struct ContainerIndex {
    cgroups: HashMap<CgroupId, IndexEntry>,
    pids: HashMap<u32, ContainerId>,
}

#[derive(Debug)]
struct IndexEntry {
    /// The container or sandbox whose cgroup this is, or lies in.
    container: Option<ContainerId>,
    /// It is the container's own cgroup, not one that the container made inside.
    own: bool,
}

/// What a cgroup is to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The container or sandbox.
    pub container: ContainerId,
    /// The cgroup is the container's own, not one below it.
    pub own: bool,
}

impl ContainerIndex {
    /// An index that knows nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// A cgroup exists. `parent` is its parent's id if known; `path` its path, or its last component alone.
    pub fn cgroup_created(&mut self, id: CgroupId, parent: Option<CgroupId>, path: &str) {
        let entry = self.classify(parent, path);
        self.cgroups.insert(id, entry);
    }

    fn classify(&self, parent: Option<CgroupId>, path: &str) -> IndexEntry {
        // The outermost id counts: a container that runs containers has its own cgroups below its own.
        let above = parent.and_then(|parent| self.cgroups.get(&parent)).and_then(|entry| entry.container.clone());
        if let Some(container) = above {
            return IndexEntry { container: Some(container), own: false };
        }
        let mut parts = path.split('/').filter(|part| !part.is_empty()).peekable();
        while let Some(part) = parts.next() {
            if let Some(id) = container_of_component(part) {
                return IndexEntry { container: Some(ContainerId::from(id)), own: parts.peek().is_none() };
            }
        }
        IndexEntry { container: None, own: false }
    }

    /// A cgroup is gone. Its id is never given again before the next boot.
    pub fn cgroup_removed(&mut self, id: CgroupId) {
        self.cgroups.remove(&id);
    }

    /// The runtime says that `pid` is the init process of `container`, whose cgroup is `cgroup` if known.
    pub fn container_runs(&mut self, container: &ContainerId, pid: u32, cgroup: Option<CgroupId>) {
        if pid > 0 {
            self.pids.insert(pid, container.clone());
        }
        if let Some(id) = cgroup {
            self.cgroups.insert(id, IndexEntry { container: Some(container.clone()), own: true });
        }
    }

    /// The process is dead: its pid may belong to another container soon.
    pub fn process_gone(&mut self, pid: u32) {
        self.pids.remove(&pid);
    }

    /// The runtime no longer knows the container.
    pub fn container_removed(&mut self, container: &ContainerId) {
        self.pids.retain(|_, owner| owner != container);
        self.cgroups.retain(|_, entry| entry.container.as_ref() != Some(container));
    }

    /// Whose cgroup it is.
    pub fn by_cgroup(&self, id: CgroupId) -> Option<Membership> {
        let entry = self.cgroups.get(&id)?;
        Some(Membership { container: entry.container.clone()?, own: entry.own })
    }

    /// Whose init process it is.
    pub fn by_pid(&self, pid: u32) -> Option<&ContainerId> {
        self.pids.get(&pid)
    }

    /// Number of cgroups and pids known.
    pub fn len(&self) -> (usize, usize) {
        (self.cgroups.len(), self.pids.len())
    }

    /// Knows nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == (0, 0)
    }
}

/// The container or sandbox id in the last component of a cgroup path.
///
/// Runtimes name the leaf after the container: the bare id with the cgroupfs driver, `<prefix>-<id>.scope` with systemd
/// (`cri-containerd-`, `crio-`; `crio-conmon-` is the monitor's and nobody's).
pub fn container_of_path(path: &str) -> Option<&str> {
    container_of_component(path.rsplit('/').next()?)
}

fn container_of_component(name: &str) -> Option<&str> {
    let id = match name.strip_suffix(".scope") {
        Some(scope) => {
            let (prefix, id) = scope.rsplit_once('-')?;
            if prefix.ends_with("conmon") {
                return None;
            }
            id
        }
        // CRI-O with cgroupfs keeps its prefix.
        None => name.strip_prefix("crio-").unwrap_or(name),
    };
    let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    is_id.then_some(id)
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
