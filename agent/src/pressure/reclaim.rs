//! Memory reclaim that the tasks of a pod must do themselves, counted by the kernel probes: with cgroup v1, which has no
//! pressure files, it shows which pods wait.

use std::sync::Arc;

use crate::cgroups::CgroupId;
use crate::cgroups::Hierarchy;
use crate::kernel::bpf::Probes;
use crate::kernel::bpf::Stalls;

/// Cgroups of a pod that are looked at, at most: a container may create many below its own.
const MAX_CGROUPS: usize = 64;

/// Counts stalls by cgroup. Calls must not block for long.
pub trait StallCounters: Send + Sync + 'static {
    /// Stalls of the tasks of this cgroup, without those below it, since it is watched; `None` if it is not.
    fn stalls(&self, id: CgroupId) -> Option<Stalls>;
}

impl StallCounters for Probes {
    fn stalls(&self, id: CgroupId) -> Option<Stalls> {
        Self::stalls(self, id)
    }
}

/// Stalls of pods. Cheap to clone.
#[derive(Clone)]
pub struct ReclaimStalls {
    counters: Arc<dyn StallCounters>,
    hierarchy: Hierarchy,
}

impl ReclaimStalls {
    /// Counted in this hierarchy.
    pub fn new(counters: Arc<dyn StallCounters>, hierarchy: Hierarchy) -> Self {
        Self { counters, hierarchy }
    }

    /// Stalls of the tasks in the cgroup at `path` and those below it; `None` if none of them is watched. Stalls of cgroups
    /// that were removed are lost, so the sum may go backwards. Blocks for the time of a few system calls.
    pub fn of_pod(&self, path: &str) -> Option<Stalls> {
        let each = self.by_cgroup(path).into_iter().map(|(_, stalls)| stalls);
        each.reduce(|sum, stalls| Stalls {
            count: sum.count.saturating_add(stalls.count),
            time: sum.time.saturating_add(stalls.time),
        })
    }

    /// Stalls of the tasks in the cgroup at `path` and in each below it, those that are watched: crun runs the processes of a
    /// container in a cgroup below the container's own. Blocks for the time of a few system calls.
    pub fn by_cgroup(&self, path: &str) -> Vec<(CgroupId, Stalls)> {
        let Ok(id) = self.hierarchy.id_of(path) else { return Vec::new() };
        let mut cgroups = vec![(id, path.to_owned())];
        let mut next = 0;
        while let Some((_, path)) = cgroups.get(next) {
            let room = MAX_CGROUPS.saturating_sub(cgroups.len());
            let below = self.hierarchy.children(path);
            cgroups.extend(below.into_iter().take(room));
            next += 1;
        }
        cgroups.into_iter().filter_map(|(id, _)| Some((id, self.counters.stalls(id)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::cgroups::HierarchyKind;

    /// Each cgroup has stalled once, for a second.
    struct Each;

    impl StallCounters for Each {
        fn stalls(&self, _: CgroupId) -> Option<Stalls> {
            Some(Stalls { count: 1, time: Duration::from_secs(1) })
        }
    }

    /// No permission for probes: nothing is watched.
    struct Nothing;

    impl StallCounters for Nothing {
        fn stalls(&self, _: CgroupId) -> Option<Stalls> {
            None
        }
    }

    #[test]
    fn stalls_of_containers_add_up() {
        let dir = tempfile::tempdir().unwrap();
        let mount = dir.path().to_owned();
        let hierarchy = Hierarchy { kind: HierarchyKind::Unified, number: 0, mount, root: "/".to_owned() };
        let id_of = |path: &str| hierarchy.id_of(path).unwrap();
        let stalls = ReclaimStalls::new(Arc::new(Each), hierarchy.clone());
        assert_eq!(stalls.of_pod("/pod"), None, "a cgroup that is gone");
        fs::create_dir_all(dir.path().join("pod/main/nested")).unwrap();
        fs::create_dir(dir.path().join("pod/other")).unwrap();
        assert_eq!(stalls.of_pod("/pod"), Some(Stalls { count: 4, time: Duration::from_secs(4) }));
        let each = stalls.by_cgroup("/pod/main");
        assert_eq!(each.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ["/pod/main", "/pod/main/nested"].map(id_of));
        (0..200).for_each(|n| fs::create_dir(dir.path().join(format!("pod/main/{n}"))).unwrap());
        assert_eq!(stalls.of_pod("/pod").map(|stalls| stalls.count), Some(MAX_CGROUPS as u64), "bounded");
        assert_eq!(ReclaimStalls::new(Arc::new(Nothing), hierarchy).of_pod("/pod"), None);
    }
}
