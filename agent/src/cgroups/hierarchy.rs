//! The hierarchy in which containers are identified: paths of processes, and the ids that probes report.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;

use thiserror::Error;

use super::mountinfo;
use super::mountinfo::CgroupMount;
use crate::filesystem::read_mounts;

/// Id of a cgroup: the inode number of its directory (Linux 5.5 and later).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CgroupId(pub u64);

/// A v1 controller whose hierarchy identifies containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// Memory: the hierarchy in which OOM kills happen.
    Memory,
    /// Process ids.
    Pids,
}

impl Controller {
    /// The kernel's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Pids => "pids",
        }
    }
}

/// Version of a hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HierarchyKind {
    /// cgroup v1, found by one of its controllers.
    V1(Controller),
    /// The one hierarchy of cgroup v2.
    Unified,
}

/// The hierarchy in which containers are identified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Version and controller.
    pub kind: HierarchyKind,
    /// Its number in `/proc/<pid>/cgroup`; 0 for v2.
    pub number: u32,
    /// Where it is mounted.
    pub mount: PathBuf,
    /// The cgroup that is mounted there, `/` unless the agent sees only a part of the tree.
    pub root: String,
}

/// No hierarchy identifies containers.
#[derive(Debug, Error)]
pub enum HierarchyError {
    /// A file of the agent's own process cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Neither kind is mounted.
    #[error("neither a cgroup v1 hierarchy with the memory or pids controller nor cgroup v2 is mounted")]
    None,
}

impl Hierarchy {
    /// The hierarchy of this machine: v1 memory where it is mounted (also on hybrid machines, where container processes
    /// stay at the root of v2), else v1 pids, else v2.
    ///
    /// # Errors
    /// No such hierarchy is mounted, or the agent's own files in `/proc` are not readable.
    pub fn find() -> Result<Self, HierarchyError> {
        let failed = |path: &'static str| move |source| HierarchyError::Read { path, source };
        let (mounts, memberships) = ("/proc/self/mountinfo", "/proc/self/cgroup");
        let mounts = read_mounts(Path::new(mounts)).map_err(failed(mounts))?;
        let memberships = std::fs::read_to_string(memberships).map_err(failed(memberships))?;
        Self::choose(&mounts, &memberships).ok_or(HierarchyError::None)
    }

    /// The choice, from the text of `mountinfo` and `cgroup` of a process.
    pub fn choose(mounts: &str, memberships: &str) -> Option<Self> {
        let mounts: Vec<CgroupMount<'_>> = mountinfo::cgroup_mounts(mounts).collect();
        let v1 = [Controller::Memory, Controller::Pids].into_iter().find_map(|controller| {
            let number = number_of(memberships, controller)?;
            let has_it = |mount: &&CgroupMount<'_>| {
                !mount.is_v2 && mount.options.split(',').any(|option| option == controller.as_str())
            };
            Some(Self::new(shortest(mounts.iter().filter(has_it))?, HierarchyKind::V1(controller), number))
        });
        v1.or_else(|| {
            let unified = shortest(mounts.iter().filter(|mount| mount.is_v2))?;
            Some(Self::new(unified, HierarchyKind::Unified, 0))
        })
    }

    fn new(mount: &CgroupMount<'_>, kind: HierarchyKind, number: u32) -> Self {
        let (point, root) = (mountinfo::unescape(mount.point), mountinfo::unescape(mount.root));
        Self { kind, number, mount: point.into(), root }
    }

    /// Where the cgroup at `path` (from the root of the hierarchy) is found in the file system; `None` if it lies
    /// outside of what is mounted.
    pub fn directory(&self, path: &str) -> Option<PathBuf> {
        let inner = Path::new(path).strip_prefix(&self.root).ok()?;
        if inner.components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
            return None;
        }
        Some(self.mount.join(inner))
    }

    /// Id of the cgroup at `path`.
    ///
    /// # Errors
    /// The cgroup does not exist or lies outside of the mount.
    pub fn id_of(&self, path: &str) -> io::Result<CgroupId> {
        let outside = || io::Error::new(io::ErrorKind::NotFound, "it lies outside of the mounted hierarchy");
        let directory = self.directory(path).ok_or_else(outside)?;
        std::fs::metadata(directory).map(|meta| CgroupId(meta.ino()))
    }

    /// Cgroups directly below `path`; none if it is gone. The kernel answers from memory: this waits for no disk.
    pub fn children(&self, path: &str) -> Vec<(CgroupId, String)> {
        let entries = self.directory(path).and_then(|directory| std::fs::read_dir(directory).ok());
        let Some(entries) = entries else { return Vec::new() };
        entries
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let id = CgroupId(entry.metadata().ok()?.ino());
                Some((id, format!("{}/{name}", path.trim_end_matches('/'))))
            })
            .collect()
    }

    /// Swap can be limited (KEP-2400). The root of v2 has no such file; the cgroup of the process with these memberships
    /// (the text of its `/proc/<pid>/cgroup`) has.
    pub fn limits_swap(&self, memberships: &str) -> bool {
        let file = match self.kind {
            HierarchyKind::V1(_) => Some(self.mount.join("memory.memsw.limit_in_bytes")),
            HierarchyKind::Unified => {
                let own = self.path_in(memberships).and_then(|path| self.directory(path));
                own.map(|own| own.join("memory.swap.max"))
            }
        };
        file.is_some_and(|file| file.exists())
    }

    /// The path that a process has in this hierarchy, from the text of its `/proc/<pid>/cgroup`.
    pub fn path_in<'a>(&self, memberships: &'a str) -> Option<&'a str> {
        memberships.lines().find_map(|line| {
            let (number, rest) = line.split_once(':')?;
            let (_, path) = rest.split_once(':')?;
            (number.parse() == Ok(self.number)).then_some(path)
        })
    }
}

fn shortest<'a>(mounts: impl Iterator<Item = &'a CgroupMount<'a>>) -> Option<&'a CgroupMount<'a>> {
    mounts.min_by_key(|mount| mount.point.len())
}

fn number_of(memberships: &str, controller: Controller) -> Option<u32> {
    memberships.lines().find_map(|line| {
        let (number, rest) = line.split_once(':')?;
        let (controllers, _) = rest.split_once(':')?;
        controllers.split(',').any(|name| name == controller.as_str()).then(|| number.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID_MOUNTS: &str = "\
25 22 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
30 25 0:27 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
31 25 0:28 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
32 25 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const HYBRID: &str = "9:name=systemd:/\n8:pids:/p\n4:memory:/m/x:y\n0::/\n";

    #[test]
    fn hybrid_machines_are_v1() {
        let hierarchy = Hierarchy::choose(HYBRID_MOUNTS, HYBRID).expect("memory is mounted");
        assert_eq!(hierarchy.kind, HierarchyKind::V1(Controller::Memory));
        assert_eq!(hierarchy.number, 4);
        assert_eq!(hierarchy.mount, Path::new("/sys/fs/cgroup/memory"));
        assert_eq!(hierarchy.path_in(HYBRID), Some("/m/x:y"));
    }

    #[test]
    fn pids_stand_in_for_memory() {
        let mounts: String = HYBRID_MOUNTS
            .lines()
            .filter(|line| !line.contains("memory"))
            .fold(String::new(), |all, line| all + line + "\n");
        let hierarchy = Hierarchy::choose(&mounts, HYBRID).expect("pids is mounted");
        assert_eq!(hierarchy.kind, HierarchyKind::V1(Controller::Pids));
        assert_eq!(hierarchy.number, 8);
    }

    #[test]
    fn v2_is_taken_alone() {
        let mounts = "30 25 0:27 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let hierarchy = Hierarchy::choose(mounts, "0::/init.scope\n").expect("v2 is mounted");
        assert_eq!(hierarchy.kind, HierarchyKind::Unified);
        assert_eq!(hierarchy.number, 0);
        assert_eq!(hierarchy.path_in("0::/init.scope\n"), Some("/init.scope"));
    }

    #[test]
    fn the_shortest_mount_counts() {
        let mounts =
            "1 2 0:1 / /var/lib/x/memory rw - cgroup none rw,memory\n2 2 0:1 / /cg/memory rw - cgroup none rw,memory\n";
        let hierarchy = Hierarchy::choose(mounts, "4:memory:/\n").expect("mounted");
        assert_eq!(hierarchy.mount, Path::new("/cg/memory"));
    }

    #[test]
    fn nothing_mounted_is_none() {
        assert_eq!(Hierarchy::choose("", HYBRID), None);
        assert_eq!(Hierarchy::choose("garbage\n - \n", "garbage\n::\n"), None);
    }

    #[test]
    fn directories_respect_the_mounted_root() {
        let hierarchy = Hierarchy {
            kind: HierarchyKind::Unified,
            number: 0,
            mount: "/sys/fs/cgroup".into(),
            root: "/part".to_owned(),
        };
        assert_eq!(hierarchy.directory("/part/a/b"), Some("/sys/fs/cgroup/a/b".into()));
        assert_eq!(hierarchy.directory("/part"), Some("/sys/fs/cgroup/".into()));
        assert_eq!(hierarchy.directory("/other"), None);
        assert_eq!(hierarchy.directory("/part/../x"), None);
    }

    #[test]
    fn swap_is_limited_where_the_kernel_has_a_file_for_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |kind, number| {
            let mount = folder.path().to_owned();
            Hierarchy { kind, number, mount, root: "/".to_owned() }
        };
        let (v1, v2) = (at(HierarchyKind::V1(Controller::Memory), 4), at(HierarchyKind::Unified, 0));
        let own = "4:memory:/\n0::/system.slice/agent.service\n";
        let put = |path: &str| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().expect("has one")).expect("made");
            std::fs::write(path, "").expect("written");
        };
        assert!(!v1.limits_swap(own) && !v2.limits_swap(own), "no such file anywhere");
        put("memory.memsw.limit_in_bytes");
        assert!(v1.limits_swap(own) && !v2.limits_swap(own));
        put("system.slice/agent.service/memory.swap.max");
        assert!(v2.limits_swap(own));
        assert!(!v2.limits_swap("4:memory:/\n0::/\n"), "the root has no such file");
    }
}
