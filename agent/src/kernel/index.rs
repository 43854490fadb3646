//! Maps cgroup ids of the kernel to pods and containers. Pure.
//!
//! Cgroup events and directory walks add ids with paths. A cgroup belongs to a container only if its name, or that of an
//! ancestor, contains the container's id. Removed cgroups stay known for a while, so that records of processes in them
//! are attributed: the kernel does not reuse an id before the next boot.

use std::collections::HashMap;
use std::collections::HashSet;
use std::collections::VecDeque;

use crate::cgroups::CgroupId;
use crate::cgroups::Driver;
use crate::cgroups::pod_uid_of;
use crate::model::CgroupPlace;
use crate::model::CgroupRole;
use crate::model::ContainerId;
use crate::model::PodUid;

/// Removed cgroups that stay known: those of some 500 pods.
const MAX_REMOVED: usize = 2048;

/// The mapping.
#[derive(Debug, Default)]
pub struct ContainerIndex {
    cgroups: HashMap<CgroupId, CgroupPlace>,
    /// Removed ones.
    removed: HashSet<CgroupId>,
    /// The same, oldest first.
    removals: VecDeque<CgroupId>,
}

impl ContainerIndex {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// A cgroup exists. `parent` is its parent's id if known; `path` its path, or its last component alone.
    pub fn cgroup_created(&mut self, id: CgroupId, parent: Option<CgroupId>, path: &str) {
        let above = parent.and_then(|parent| self.cgroups.get(&parent));
        let place = match above {
            Some(above) if !path.starts_with('/') => place_of(&format!("{}/{path}", above.path)),
            _ => place_of(path),
        };
        self.cgroups.insert(id, place);
    }

    /// A cgroup was removed.
    pub fn cgroup_removed(&mut self, id: CgroupId) {
        if self.cgroups.contains_key(&id) && self.removed.insert(id) {
            self.removals.push_back(id);
        }
        while self.removals.len() > MAX_REMOVED {
            if let Some(oldest) = self.removals.pop_front() {
                self.removed.remove(&oldest);
                self.cgroups.remove(&oldest);
            }
        }
    }

    /// A walk has found these cgroups: those that were known before it and are not among them were removed.
    pub fn found(&mut self, known_before: &HashSet<CgroupId>, found: &[(CgroupId, String)]) {
        let ids: HashSet<CgroupId> = found.iter().map(|(id, _)| *id).collect();
        found.iter().for_each(|(id, path)| self.cgroup_created(*id, None, path));
        known_before.difference(&ids).for_each(|id| self.cgroup_removed(*id));
    }

    /// Ids of the cgroups that are known and were not removed.
    pub fn existing(&self) -> HashSet<CgroupId> {
        self.cgroups.keys().copied().filter(|id| !self.removed.contains(id)).collect()
    }

    /// A cgroup by its id, also for a while after its removal.
    pub fn by_cgroup(&self, id: CgroupId) -> Option<&CgroupPlace> {
        self.cgroups.get(&id)
    }

    /// Cgroups of containers and sandboxes, and those below them, that were not removed.
    pub fn containers(&self) -> impl Iterator<Item = (CgroupId, &CgroupPlace)> {
        let all = self.cgroups.iter().map(|(id, place)| (*id, place));
        all.filter(move |(id, place)| place.container.is_some() && !self.removed.contains(id))
    }
}

/// The place of a cgroup by its path (or by its last component alone), under either driver.
pub fn place_of(path: &str) -> CgroupPlace {
    let mut place = CgroupPlace { path: path.to_owned(), role: CgroupRole::Other, pod: None, container: None };
    for component in path.split('/').filter(|component| !component.is_empty()) {
        // The outermost container counts: nested ones belong to the container that runs them.
        if place.container.is_some() {
            place.role = CgroupRole::InContainer;
            // A container of no pod that has pods is a node (kind): their containers count.
            if place.pod.is_none() && role_of_component(component, CgroupRole::Other) == CgroupRole::AllPods {
                (place.container, place.role) = (None, CgroupRole::AllPods);
            }
            continue;
        }
        if let Some(id) = container_of_component(component) {
            place.container = Some(ContainerId::from(id));
            place.role = CgroupRole::Container;
        } else if place.pod.is_none() {
            place.role = role_of_component(component, place.role);
            if place.role == CgroupRole::Pod {
                place.pod = pod_of_component(component);
            }
        } else {
            place.role = CgroupRole::Other;
        }
    }
    place
}

/// The role of a component, from that of the component above.
fn role_of_component(component: &str, above: CgroupRole) -> CgroupRole {
    let unit = component.strip_suffix(".slice");
    let last = unit.unwrap_or(component).rsplit('-').next().unwrap_or_default();
    match (above, last) {
        (CgroupRole::Other, "kubepods") => CgroupRole::AllPods,
        (CgroupRole::AllPods, "burstable" | "besteffort") => CgroupRole::QosClass,
        (CgroupRole::AllPods | CgroupRole::QosClass, _) if pod_of_component(component).is_some() => CgroupRole::Pod,
        _ => CgroupRole::Other,
    }
}

fn pod_of_component(component: &str) -> Option<PodUid> {
    let driver = if component.ends_with(".slice") { Driver::Systemd } else { Driver::Cgroupfs };
    pod_uid_of(component, driver).map(PodUid::from)
}

/// The container or sandbox id in a component of a cgroup path.
///
/// Runtimes name the leaf after the container: the bare id with the cgroupfs driver, `<prefix>-<id>.scope` with systemd
/// (`cri-containerd-`, `crio-`; `crio-conmon-` is the monitor's and belongs to no container).
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
