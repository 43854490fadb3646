//! Where a cgroup is: its folders by controller, found by its path or by a process in it, and the processes in it.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use super::file::Folder;
use crate::cgroups::Layout;

/// Cgroups below another one that are searched for processes, at most: a container can create any number.
const MOST_BELOW: usize = 256;
/// The cgroup of CRI-O's monitor of a container is a sibling of the container's and is named after it: `crio-conmon-<id>`,
/// or `crio-conmon-<id>.scope`.
const MONITOR: &str = "crio-conmon-";

/// The folders of a cgroup, by controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupPlace {
    pub(super) v2: bool,
    /// CPU accounting: the controller `cpuacct` of v1.
    pub(super) cpu: Option<PathBuf>,
    /// CPU limits: the controller `cpu`.
    pub(super) cpu_shares: Option<PathBuf>,
    pub(super) memory: Option<PathBuf>,
    pub(super) pids: Option<PathBuf>,
    pub(super) io: Option<PathBuf>,
}

/// A cgroup whose folders are open: its files are read without looking up its path for each of them. One that was removed
/// since has no files.
#[derive(Debug)]
pub struct OpenCgroup {
    /// None of its folders is missing: all were there, and could be opened.
    pub is_whole: bool,
    pub(super) v2: bool,
    // By controller, as those of [`CgroupPlace`]; absent if they do not exist.
    pub(super) cpu: Option<Arc<Folder>>,
    pub(super) cpu_shares: Option<Arc<Folder>>,
    pub(super) memory: Option<Arc<Folder>>,
    pub(super) pids: Option<Arc<Folder>>,
    pub(super) io: Option<Arc<Folder>>,
}

impl OpenCgroup {
    /// The most descriptors that one holds.
    pub const MOST_FOLDERS: usize = 5;
}

impl CgroupPlace {
    /// The cgroup at `path`, the same in all hierarchies.
    pub fn at(layout: &Layout, path: &str) -> Self {
        let below = |controller: &str| Some(layout.mount_of(controller)?.join(path.trim_start_matches('/')));
        Self::new(layout, below)
    }

    /// The cgroup of a container by its id, or of a pod by its UID, from the text of `/proc/<pid>/cgroup` of one of its
    /// processes. `None` if the process is not in it.
    ///
    /// The process may be further below, since a container can divide its cgroup. The outermost cgroup whose name contains
    /// the id counts: those below have names that the container gave them.
    pub fn named(layout: &Layout, memberships: &str, id: &str) -> Option<Self> {
        // The systemd driver replaces the dashes of UIDs.
        let underscored = id.replace('-', "_");
        let has_id = |folder: &&Path| {
            let name = folder.file_name().map(OsStr::to_string_lossy);
            name.is_some_and(|name| !name.starts_with(MONITOR) && (name.contains(id) || name.contains(&underscored)))
        };
        let below = |controller: &str| {
            let path = Path::new(path_in(layout, memberships, controller)?);
            let outermost = path.ancestors().filter(has_id).last()?;
            Some(layout.mount_of(controller)?.join(outermost.strip_prefix("/").ok()?))
        };
        let place = Self::new(layout, below);
        (place.cpu.is_some() || place.memory.is_some()).then_some(place)
    }

    /// The path of the cgroup that accounts for a process, from the text of its `/proc/<pid>/cgroup`. `None` if that is the
    /// root, which accounts for the whole machine, or not the same one for CPU and memory.
    pub fn path_of_process(layout: &Layout, memberships: &str) -> Option<String> {
        let path = path_in(layout, memberships, cpu_controller(layout))?;
        let accounts = path != "/" && path_in(layout, memberships, "memory") == Some(path);
        accounts.then(|| path.to_owned())
    }

    fn new(layout: &Layout, below: impl Fn(&str) -> Option<PathBuf>) -> Self {
        Self {
            v2: layout.is_v2(),
            cpu: below(cpu_controller(layout)),
            cpu_shares: below("cpu"),
            memory: below("memory"),
            pids: below("pids"),
            io: below(if layout.is_v2() { "io" } else { "blkio" }),
        }
    }

    /// The cgroup's path below the root of its hierarchy; that of the CPU controller where they differ.
    pub fn path(&self, layout: &Layout) -> Option<String> {
        let below = |controller: &str, folder: &Option<PathBuf>| {
            let path = folder.as_deref()?.strip_prefix(layout.mount_of(controller)?).ok()?;
            Some(format!("/{}", path.display()))
        };
        below(cpu_controller(layout), &self.cpu).or_else(|| below("memory", &self.memory))
    }

    /// False once the cgroup was removed.
    pub fn exists(&self) -> bool {
        self.cpu.iter().chain(&self.memory).any(|folder| folder.is_dir())
    }

    /// Opens each folder once: with v2 all controllers have the same.
    pub fn open(&self) -> OpenCgroup {
        let mut opened: Vec<(&Path, Arc<Folder>)> = Vec::new();
        let paths = [&self.cpu, &self.cpu_shares, &self.memory, &self.pids, &self.io];
        let folders = paths.map(|path| {
            let path = path.as_deref()?;
            if let Some((_, folder)) = opened.iter().find(|(known, _)| *known == path) {
                return Some(folder.clone());
            }
            let folder = Arc::new(Folder::open(path)?);
            opened.push((path, folder.clone()));
            Some(folder)
        });
        let is_whole = paths.iter().zip(&folders).all(|(path, folder)| path.is_some() == folder.is_some());
        let [cpu, cpu_shares, memory, pids, io] = folders;
        OpenCgroup { is_whole, v2: self.v2, cpu, cpu_shares, memory, pids, io }
    }

    /// Ids of the processes in the cgroup itself. If there are none, of those below it: with v2 all processes of a container
    /// that has divided its cgroup are there. None if the cgroup was removed.
    pub fn processes(&self) -> Vec<u32> {
        let Some(folder) = self.pids.as_ref().or(self.memory.as_ref()).or(self.cpu.as_ref()) else { return Vec::new() };
        let own = processes_in(folder);
        if own.is_empty() && self.v2 { processes_below(folder) } else { own }
    }
}

/// The path that a process has in the hierarchy of a controller, from the text of its `/proc/<pid>/cgroup`; `None` if it lies
/// outside of what the agent sees.
fn path_in<'a>(layout: &Layout, memberships: &'a str, controller: &str) -> Option<&'a str> {
    let is_v2 = layout.is_v2();
    let path = memberships.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let fits = if is_v2 { controllers.is_empty() } else { controllers.split(',').any(|c| c == controller) };
        fits.then_some(path)
    });
    path.filter(|path| !path.split('/').any(|part| part == ".."))
}

fn processes_in(folder: &Path) -> Vec<u32> {
    let list = Folder::open(folder).and_then(|folder| folder.text("cgroup.procs"));
    process_ids(&list.unwrap_or_default())
}

fn processes_below(folder: &Path) -> Vec<u32> {
    let mut queue = VecDeque::from([folder.to_owned()]);
    let (mut found, mut searched) = (Vec::new(), 0);
    while let Some(folder) = queue.pop_front() {
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let is_cgroup = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        for below in entries.filter(is_cgroup).take(MOST_BELOW - searched) {
            searched += 1;
            found.extend(processes_in(&below.path()));
            queue.push_back(below.path());
        }
    }
    found
}

/// The lines of `cgroup.procs`.
pub(super) fn process_ids(list: &str) -> Vec<u32> {
    list.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

fn cpu_controller(layout: &Layout) -> &'static str {
    if layout.is_v2() { "cpu" } else { "cpuacct" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::usage::basic::tests::write;

    #[test]
    fn the_cgroup_of_a_container_is_found_from_processes_below_it() {
        let v2 = Layout::V2 { mount: "/cgroup".into() };
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        let container = format!("/kubepods.slice/kubepods-pod1_2.slice/cri-containerd-{id}.scope");
        let pod = "/kubepods.slice/kubepods-pod1_2.slice";
        for below in ["", "/init", "/init.scope", &format!("/docker/{id}/kubepods/pod1-2")] {
            let memberships = format!("0::{container}{below}\n");
            let named = |id: &str| CgroupPlace::named(&v2, &memberships, id);
            assert_eq!(named(id), Some(CgroupPlace::at(&v2, &container)), "{below}");
            assert_eq!(named("1-2"), Some(CgroupPlace::at(&v2, pod)), "{below}");
            assert_eq!((named("3-4"), named(&id.replace('0', "f"))), (None, None), "{below}");
        }
        let outside = format!("0::/../..{container}\n");
        assert_eq!(CgroupPlace::named(&v2, &outside, id), None, "not in the tree that is mounted");
        let controllers = ["cpu", "cpuacct", "memory"].map(|name| (name.to_owned(), PathBuf::from("/v1").join(name)));
        let v1 = Layout::V1 { controllers: controllers.into(), unified: None };
        let memberships = format!("4:cpu,cpuacct:/kubepods/pod1-2/{id}/a\n3:memory:/\n0::/kubepods/pod1-2/{id}\n");
        let place = CgroupPlace::named(&v1, &memberships, id).unwrap();
        assert_eq!(place.path(&v1), Some(format!("/kubepods/pod1-2/{id}")));
        assert_eq!(place.memory, None, "memory is charged elsewhere");
    }

    #[test]
    fn the_cgroup_of_a_monitor_is_not_its_containers() {
        let v2 = Layout::V2 { mount: "/cgroup".into() };
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        for (pod, scope) in [("/kubepods.slice/kubepods-pod1_2.slice", ".scope"), ("/kubepods/pod1-2", "")] {
            let container = format!("{pod}/crio-{id}{scope}");
            let monitor = format!("{pod}/crio-conmon-{id}{scope}");
            for (path, expected) in [
                (&container, Some(&container)),
                (&format!("{container}/container"), Some(&container)),
                (&monitor, None),
            ] {
                let named = |id: &str| CgroupPlace::named(&v2, &format!("0::{path}\n"), id);
                assert_eq!(named(id), expected.map(|path| CgroupPlace::at(&v2, path)), "{path}");
                assert_eq!(named("1-2"), Some(CgroupPlace::at(&v2, pod)), "{path}");
            }
        }
    }

    #[test]
    fn processes_of_a_divided_cgroup_are_below_it() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &[("cgroup.procs", "")]);
        write(&dir.path().join("init"), &[("cgroup.procs", "7\n")]);
        write(&dir.path().join("docker/one"), &[("cgroup.procs", "8\n9\n")]);
        let mut found = CgroupPlace::at(&Layout::V2 { mount: dir.path().to_owned() }, "/").processes();
        found.sort_unstable();
        assert_eq!(found, [7, 8, 9]);
        for index in 0..2 * MOST_BELOW {
            write(&dir.path().join(format!("docker/{index}")), &[("cgroup.procs", "10\n")]);
        }
        let found = CgroupPlace::at(&Layout::V2 { mount: dir.path().to_owned() }, "/").processes();
        assert!(found.len() <= MOST_BELOW, "bounded: {}", found.len());
    }

    #[test]
    fn the_cgroup_that_accounts_for_a_process() {
        let v2 = Layout::V2 { mount: "/cgroup".into() };
        let of = |layout: &Layout, memberships: &str| CgroupPlace::path_of_process(layout, memberships);
        let service = Some("/system.slice/kubelet.service".to_owned());
        assert_eq!(of(&v2, "0::/system.slice/kubelet.service\n"), service);
        assert_eq!((of(&v2, "0::/\n"), of(&v2, "0::/../other\n"), of(&v2, "")), (None, None, None));
        let controllers = ["cpuacct", "memory"].map(|name| (name.to_owned(), PathBuf::from("/v1").join(name)));
        let v1 = Layout::V1 { controllers: controllers.into(), unified: None };
        let memberships = |cpu: &str, memory: &str| {
            format!("4:cpu,cpuacct:{cpu}\n3:memory:{memory}\n1:name=systemd:/system.slice/kubelet.service\n")
        };
        let path = "/system.slice/kubelet.service";
        assert_eq!(of(&v1, &memberships(path, path)), service);
        assert_eq!(of(&v1, &memberships("/", "/")), None, "systemd does not account for the service");
        assert_eq!(of(&v1, &memberships("/", path)), None);
    }
}
