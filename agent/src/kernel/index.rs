//! Maps cgroup ids and pids of the kernel to container and sandbox ids of the runtime.
//!
//! Cgroup events and directory walks add ids with paths, the runtime's status adds pids. A cgroup belongs to a container
//! only if its name, or that of an ancestor, contains the container's id. Pure.

use std::collections::HashMap;

use crate::cgroups::CgroupId;
use crate::model::ContainerId;

/// The mapping.
#[derive(Debug, Default)]
pub struct ContainerIndex {
    cgroups: HashMap<CgroupId, IndexEntry>,
    pids: HashMap<u32, ContainerId>,
}

#[derive(Debug)]
struct IndexEntry {
    /// The container or sandbox whose cgroup this is, or is a descendant of.
    container: Option<ContainerId>,
    /// It is the container's own cgroup, not a descendant.
    own: bool,
}

/// Relation of a cgroup to a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The container or sandbox.
    pub container: ContainerId,
    /// The cgroup is the container's own, not one below it.
    pub own: bool,
}

impl ContainerIndex {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// A cgroup exists. `parent` is its parent's id if known; `path` its path, or its last component alone.
    pub fn cgroup_created(&mut self, id: CgroupId, parent: Option<CgroupId>, path: &str) {
        let entry = self.classify(parent, path);
        self.cgroups.insert(id, entry);
    }

    fn classify(&self, parent: Option<CgroupId>, path: &str) -> IndexEntry {
        // The outermost id wins: nested containers belong to the container that runs them.
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

    /// A cgroup was removed. The kernel does not reuse its id before the next boot.
    pub fn cgroup_removed(&mut self, id: CgroupId) {
        self.cgroups.remove(&id);
    }

    /// The runtime reported `pid` as the init process of `container`, whose cgroup is `cgroup` if known.
    pub fn container_runs(&mut self, container: &ContainerId, pid: u32, cgroup: Option<CgroupId>) {
        if pid > 0 {
            self.pids.insert(pid, container.clone());
        }
        if let Some(id) = cgroup {
            self.cgroups.insert(id, IndexEntry { container: Some(container.clone()), own: true });
        }
    }

    /// The process ended: its pid may be reused.
    pub fn process_gone(&mut self, pid: u32) {
        self.pids.remove(&pid);
    }

    /// The runtime no longer knows the container.
    pub fn container_removed(&mut self, container: &ContainerId) {
        self.pids.retain(|_, owner| owner != container);
        self.cgroups.retain(|_, entry| entry.container.as_ref() != Some(container));
    }

    /// The container of a cgroup.
    pub fn by_cgroup(&self, id: CgroupId) -> Option<Membership> {
        let entry = self.cgroups.get(&id)?;
        Some(Membership { container: entry.container.clone()?, own: entry.own })
    }

    /// The container of an init process.
    pub fn by_pid(&self, pid: u32) -> Option<&ContainerId> {
        self.pids.get(&pid)
    }

    /// Number of cgroups and pids known.
    pub fn len(&self) -> (usize, usize) {
        (self.cgroups.len(), self.pids.len())
    }

    /// Holds no cgroup and no pid.
    pub fn is_empty(&self) -> bool {
        self.len() == (0, 0)
    }
}

/// The container or sandbox id in the last component of a cgroup path.
///
/// Runtimes name the leaf after the container: the bare id with the cgroupfs driver, `<prefix>-<id>.scope` with systemd
/// (`cri-containerd-`, `crio-`; `crio-conmon-` is the monitor's and belongs to no container).
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
