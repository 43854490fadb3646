//! Moves processes into the cgroup of a system daemon (`kubeletCgroups`, `systemCgroups`). Blocks, as [`super::files`].

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::io::BufRead as _;
use std::path::Path;
use std::path::PathBuf;

use super::CgroupError;
use super::Layout;
use super::error::OnPath as _;
use super::files;
use super::layout::below;

/// How often the root is read for processes that were started meanwhile.
const ROUNDS: u32 = 10;
/// The hierarchy of v1 whose root is searched.
const SEARCHED: &str = "cpu";

/// A cgroup without limits of its own, created when a process is moved to it.
#[derive(Clone, Debug)]
pub struct DaemonCgroup {
    layout: Layout,
    path: String,
    processes: PathBuf,
}

impl DaemonCgroup {
    /// The cgroup at `path`, a full path with a leading slash. Creates nothing.
    pub fn new(layout: Layout, path: String) -> Self {
        Self { layout, path, processes: PathBuf::from("/proc") }
    }

    /// Moves a process to this cgroup. Returns whether it was elsewhere.
    ///
    /// # Errors
    /// The cgroup cannot be created, or the kernel refuses the process.
    pub fn take(&self, pid: u32) -> Result<bool, CgroupError> {
        let elsewhere = |folder: &PathBuf| !processes_of(folder).is_ok_and(|pids| pids.contains(&pid));
        let folders: Vec<PathBuf> = self.folders().into_iter().filter(elsewhere).collect();
        if folders.is_empty() {
            return Ok(false);
        }
        files::create(&self.layout, &self.path)?;
        for folder in folders {
            let file = folder.join("cgroup.procs");
            fs::OpenOptions::new()
                .append(true)
                .open(&file)
                .and_then(|mut file| io::Write::write_all(&mut file, pid.to_string().as_bytes()))
                .on("move a process to", &file)?;
        }
        Ok(true)
    }

    /// Moves the processes at the root of the hierarchy to this cgroup, except PID 1, kernel threads and `spared`, which has
    /// another place. Returns how many.
    ///
    /// # Errors
    /// The root cannot be read, or the first process that is refused and has not ended.
    pub fn take_from_root(&self, spared: Option<u32>) -> Result<usize, CgroupError> {
        let Some(root) = self.layout.mount_of(SEARCHED) else { return Ok(0) };
        let mut moved = 0;
        for _ in 0..ROUNDS {
            let is_stray = |pid: &u32| *pid > 1 && Some(*pid) != spared && self.has_program(*pid);
            let found: Vec<u32> = processes_of(root)?.into_iter().filter(is_stray).collect();
            if found.is_empty() {
                break;
            }
            for pid in found {
                match self.take(pid) {
                    Err(error) if self.has_program(pid) => return Err(error),
                    // It has ended meanwhile.
                    Err(_) => {}
                    Ok(_) => moved += 1,
                }
            }
        }
        Ok(moved)
    }

    /// The folders of this cgroup. On v1 only those of controllers: systemd tracks its services by the other hierarchies.
    fn folders(&self) -> BTreeSet<PathBuf> {
        match &self.layout {
            Layout::V2 { mount } => [below(mount, &self.path)].into(),
            Layout::V1 { controllers, .. } => {
                let used = controllers.iter().filter(|(name, _)| !name.starts_with("name="));
                used.map(|(_, mount)| below(mount, &self.path)).collect()
            }
        }
    }

    /// False for kernel threads and for processes that have ended.
    fn has_program(&self, pid: u32) -> bool {
        fs::read_link(self.processes.join(pid.to_string()).join("exe")).is_ok()
    }
}

/// Processes of one cgroup in one hierarchy, without its descendants.
fn processes_of(folder: &Path) -> Result<BTreeSet<u32>, CgroupError> {
    let file = folder.join("cgroup.procs");
    let lines = io::BufReader::new(fs::File::open(&file).on("read", &file)?).lines();
    let lines = lines.collect::<io::Result<Vec<String>>>().on("read", &file)?;
    Ok(lines.iter().filter_map(|line| line.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Two hierarchies with these processes at their roots, and a `/proc` in which 1 and 30 to 39 have programs.
    fn machine(folder: &Path, processes: &str) -> DaemonCgroup {
        let mut controllers = std::collections::BTreeMap::new();
        for name in ["cpu", "memory", "name=systemd"] {
            let mount = folder.join(name);
            fs::create_dir_all(mount.join("daemons")).expect("a folder");
            fs::write(mount.join("cgroup.procs"), processes).expect("a file");
            fs::write(mount.join("daemons/cgroup.procs"), "").expect("a file");
            controllers.insert(name.to_owned(), mount);
        }
        for pid in [1].into_iter().chain(30..40) {
            let process = folder.join("proc").join(pid.to_string());
            fs::create_dir_all(&process).expect("a folder");
            symlink("/bin/true", process.join("exe")).expect("a link");
        }
        let layout = Layout::V1 { controllers, unified: None };
        DaemonCgroup { processes: folder.join("proc"), ..DaemonCgroup::new(layout, "/daemons".to_owned()) }
    }

    fn written(folder: &Path, hierarchy: &str) -> String {
        fs::read_to_string(folder.join(hierarchy).join("daemons/cgroup.procs")).expect("a file")
    }

    #[test]
    fn a_process_is_moved_once_and_stays_in_the_hierarchy_of_its_service() {
        let folder = tempfile::tempdir().expect("a folder");
        let cgroup = machine(folder.path(), "");
        assert!(cgroup.take(31).expect("moved"));
        assert_eq!((written(folder.path(), "cpu"), written(folder.path(), "memory")), ("31".into(), "31".into()));
        assert_eq!(written(folder.path(), "name=systemd"), "");
        assert!(!cgroup.take(31).expect("there already"));
        // A process that left one hierarchy is moved back in that one.
        fs::write(folder.path().join("memory/daemons/cgroup.procs"), "").expect("a file");
        assert!(cgroup.take(31).expect("moved"));
        assert_eq!((written(folder.path(), "cpu"), written(folder.path(), "memory")), ("31".into(), "31".into()));
    }

    #[test]
    fn init_and_kernel_threads_stay_at_the_root() {
        let folder = tempfile::tempdir().expect("a folder");
        assert_eq!(machine(folder.path(), "1\n2\n20\n").take_from_root(None).expect("read"), 0);
        let folder = tempfile::tempdir().expect("a folder");
        let cgroup = machine(folder.path(), "1\n2\n33\n34\n");
        // Without a kernel the process stays listed in the file of the root, so every round finds it again.
        assert!(cgroup.take_from_root(Some(34)).expect("moved") > 0);
        assert_eq!(written(folder.path(), "cpu"), "33");
    }

    #[test]
    fn a_root_that_cannot_be_read_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let cgroup = machine(folder.path(), "33\n");
        fs::remove_file(folder.path().join("cpu/cgroup.procs")).expect("removed");
        let error = cgroup.take_from_root(None).expect_err("not readable").to_string();
        assert!(error.starts_with("cannot read ") && error.contains("cpu/cgroup.procs"), "{error}");
    }
}
