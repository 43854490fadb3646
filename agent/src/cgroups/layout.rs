//! Mount points of the cgroup hierarchies. Pure.

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;

use super::mountinfo;

/// Controllers a pod's cgroup is checked for under v2.
const USED_V2: [&str; 5] = ["cpu", "cpuset", "hugetlb", "memory", "pids"];
/// Hierarchies a pod's cgroup is checked for under v1, as far as mounted.
const USED_V1: [&str; 7] = ["cpu", "cpuacct", "cpuset", "hugetlb", "memory", "name=systemd", "pids"];

/// Controllers without which no pod is limited under v1.
const NEEDED_V1: [&str; 4] = ["cpu", "cpuacct", "cpuset", "memory"];

/// The cgroup hierarchies of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// cgroup v2: one hierarchy for all controllers.
    V2 {
        /// Its mount point.
        mount: PathBuf,
    },
    /// cgroup v1: one hierarchy per controller or group of controllers; also hybrid machines.
    V1 {
        /// Mount point by controller (named hierarchies as `name=...`); several controllers may share one.
        controllers: BTreeMap<String, PathBuf>,
        /// Mount point of the v2 hierarchy beside them, on hybrid machines.
        unified: Option<PathBuf>,
    },
}

impl Layout {
    /// The v1 (or hybrid) layout in a `mountinfo` table; `None` if it has no v1 hierarchy. Of several mounts of one
    /// controller the shortest path is used.
    pub fn from_mounts(table: &str) -> Option<Self> {
        let mut controllers: BTreeMap<String, PathBuf> = BTreeMap::new();
        let mut unified: Option<PathBuf> = None;
        for mount in mountinfo::cgroup_mounts(table) {
            let point = PathBuf::from(mountinfo::unescape(mount.point));
            let is_shorter = |known: &PathBuf| point.as_os_str().len() < known.as_os_str().len();
            if mount.is_v2 {
                if unified.as_ref().is_none_or(is_shorter) {
                    unified = Some(point);
                }
                continue;
            }
            for controller in mount.options.split(',').filter(|option| is_controller(option)) {
                if controllers.get(controller).is_none_or(is_shorter) {
                    controllers.insert(controller.to_owned(), point.clone());
                }
            }
        }
        (!controllers.is_empty()).then_some(Self::V1 { controllers, unified })
    }

    /// True for v2.
    pub fn is_v2(&self) -> bool {
        matches!(self, Self::V2 { .. })
    }

    /// Every mount point, each once.
    pub fn mounts(&self) -> Vec<&Path> {
        match self {
            Self::V2 { mount } => vec![mount],
            Self::V1 { controllers, unified } => {
                let mut mounts: Vec<&Path> = controllers.values().chain(unified).map(PathBuf::as_path).collect();
                mounts.sort_unstable();
                mounts.dedup();
                mounts
            }
        }
    }

    /// The mount point of a controller's hierarchy; `None` if there is none.
    pub fn mount_of(&self, controller: &str) -> Option<&Path> {
        match self {
            Self::V2 { mount } => Some(mount),
            Self::V1 { controllers, .. } => controllers.get(controller).map(PathBuf::as_path),
        }
    }

    /// Controllers that a node needs and that are not mounted. None on v2, where a cgroup is checked for those that the root
    /// offers.
    pub fn missing_controllers(&self) -> Vec<&'static str> {
        match self {
            Self::V2 { .. } => Vec::new(),
            Self::V1 { controllers, .. } => {
                NEEDED_V1.into_iter().filter(|needed| !controllers.contains_key(*needed)).collect()
            }
        }
    }

    /// Directories that must exist for the cgroup at `path` to be complete.
    pub(super) fn required_dirs(&self, path: &str) -> Vec<PathBuf> {
        match self {
            Self::V2 { mount } => vec![below(mount, path)],
            Self::V1 { controllers, .. } => {
                let used = USED_V1.iter().filter_map(|controller| controllers.get(*controller));
                used.map(|mount| below(mount, path)).collect()
            }
        }
    }

    /// Controllers (v2) that must be enabled in a complete cgroup, of those that the root offers.
    pub(super) fn used_controllers(root_controllers: &str) -> Vec<&'static str> {
        let offered: Vec<&str> = root_controllers.split_whitespace().collect();
        USED_V2.into_iter().filter(|controller| offered.contains(controller)).collect()
    }
}

/// Mount options of a v1 hierarchy that are not its controllers.
fn is_controller(option: &str) -> bool {
    const FLAGS: [&str; 6] = ["rw", "ro", "xattr", "noprefix", "clone_children", "favordynmods"];
    !option.is_empty() && !FLAGS.contains(&option) && !option.starts_with("release_agent=")
}

/// `path` (with a leading slash) below a mount point.
pub(super) fn below(mount: &Path, path: &str) -> PathBuf {
    mount.join(path.trim_start_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_mounts() {
        let table = "\
            24 20 0:22 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
            25 24 0:23 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
            26 24 0:24 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
            27 24 0:24 / /mnt/longer/path/to/memory rw,relatime - cgroup cgroup rw,memory\n\
            28 24 0:25 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/x,name=systemd\n\
            29 24 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let layout = Layout::from_mounts(table).expect("v1 hierarchies");
        let mount = |controller| layout.mount_of(controller).map(|path| path.to_str().expect("text"));
        assert_eq!(mount("cpuacct"), Some("/sys/fs/cgroup/cpu,cpuacct"));
        assert_eq!(mount("memory"), Some("/sys/fs/cgroup/memory"));
        assert_eq!(mount("name=systemd"), Some("/sys/fs/cgroup/systemd"));
        assert_eq!(mount("xattr"), None);
        assert_eq!(layout.missing_controllers(), ["cpuset"]);
        assert_eq!(layout.mounts().len(), 4);
        assert_eq!(
            layout.required_dirs("/kubepods"),
            ["cpu,cpuacct", "cpu,cpuacct", "memory", "systemd"]
                .map(|dir| PathBuf::from(format!("/sys/fs/cgroup/{dir}/kubepods")))
        );
    }

    #[test]
    fn only_v2_mounted_is_not_v1() {
        assert_eq!(Layout::from_mounts("29 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"), None);
    }

    #[test]
    fn controllers_in_use() {
        assert_eq!(Layout::used_controllers("cpuset cpu io memory pids misc\n"), ["cpu", "cpuset", "memory", "pids"]);
    }
}
