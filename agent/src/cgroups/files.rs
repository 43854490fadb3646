//! Directories and processes of one cgroup: existence, creation, removal. Blocks: the kernel serialises changes of the
//! tree, so a busy node may take milliseconds.
//!
//! `cgroups-rs` does not fit here: of v1 it creates cgroups of the controllers that it implements only (no `misc`, no
//! `unified` hierarchy of a hybrid machine), takes the controllers of v2 from the fixed path `/sys/fs/cgroup`, and does
//! not report a controller that is not enabled.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::io::BufRead as _;
use std::path::Path;
use std::path::PathBuf;

use super::CgroupError;
use super::Layout;
use super::error::OnPath as _;
use super::layout::below;

/// Processes read of one cgroup. More are found when the first ones are gone.
const MAX_PIDS: usize = 65_536;

/// True if the cgroup exists in every hierarchy that the kubelet checks.
pub(super) fn exists(layout: &Layout, path: &str) -> bool {
    let dirs = layout.required_dirs(path);
    if dirs.is_empty() || !dirs.iter().all(|dir| dir.is_dir()) {
        return false;
    }
    match layout {
        Layout::V1 { .. } => true,
        Layout::V2 { .. } => missing_controllers(layout, path).is_empty(),
    }
}

/// Controllers (v2) or directories (v1) that the cgroup lacks.
pub(super) fn missing(layout: &Layout, path: &str) -> Vec<String> {
    match layout {
        Layout::V2 { .. } => missing_controllers(layout, path).into_iter().map(str::to_owned).collect(),
        Layout::V1 { .. } => {
            let dirs = layout.required_dirs(path).into_iter().filter(|dir| !dir.is_dir());
            dirs.map(|dir| dir.display().to_string()).collect()
        }
    }
}

fn missing_controllers(layout: &Layout, path: &str) -> Vec<&'static str> {
    let Layout::V2 { mount } = layout else { return Vec::new() };
    let read = |dir: &Path| fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
    let own = read(&below(mount, path));
    let own: Vec<&str> = own.split_whitespace().collect();
    Layout::used_controllers(&read(mount)).into_iter().filter(|controller| !own.contains(controller)).collect()
}

/// Creates the cgroup and its missing ancestors in all hierarchies.
pub(super) fn create(layout: &Layout, path: &str) -> Result<(), CgroupError> {
    match layout {
        Layout::V2 { mount } => create_v2(mount, path),
        Layout::V1 { controllers, unified } => {
            for mount in layout.mounts() {
                let is_cpuset = controllers.get("cpuset").is_some_and(|cpuset| cpuset == mount);
                create_v1(mount, path, is_cpuset && unified.as_deref() != Some(mount))?;
            }
            Ok(())
        }
    }
}

/// Creates directories level by level and enables the controllers of the root at each level for the next one.
fn create_v2(mount: &Path, path: &str) -> Result<(), CgroupError> {
    let file = mount.join("cgroup.controllers");
    let offered = fs::read_to_string(&file).on("read", &file)?;
    let mut dir = mount.to_owned();
    for component in path.split('/').filter(|component| !component.is_empty()) {
        enable_controllers(&dir, &offered);
        dir.push(component);
        make_dir(&dir)?;
    }
    Ok(())
}

/// A controller that cannot be enabled (a threaded cgroup, a kernel option) is skipped here and reported by [`missing`].
fn enable_controllers(dir: &Path, offered: &str) {
    let file = dir.join("cgroup.subtree_control");
    let enabled = fs::read_to_string(&file).unwrap_or_default();
    let enabled: Vec<&str> = enabled.split_whitespace().collect();
    let lacking: Vec<String> =
        offered.split_whitespace().filter(|name| !enabled.contains(name)).map(|name| format!("+{name}")).collect();
    if lacking.is_empty() || fs::write(&file, lacking.join(" ")).is_ok() {
        return;
    }
    for controller in lacking {
        if let Err(error) = fs::write(&file, &controller) {
            tracing::debug!(file = %file.display(), controller, %error, "controller not enabled");
        }
    }
}

fn create_v1(mount: &Path, path: &str, is_cpuset: bool) -> Result<(), CgroupError> {
    let mut dir = mount.to_owned();
    for component in path.split('/').filter(|component| !component.is_empty()) {
        let parent = dir.clone();
        dir.push(component);
        make_dir(&dir)?;
        if is_cpuset {
            inherit_cpuset(&parent, &dir)?;
        }
    }
    Ok(())
}

/// A new cpuset of v1 is empty, and no process can be moved to an empty one.
fn inherit_cpuset(parent: &Path, dir: &Path) -> Result<(), CgroupError> {
    for name in ["cpuset.cpus", "cpuset.mems"] {
        let file = dir.join(name);
        if fs::read_to_string(&file).is_ok_and(|own| !own.trim().is_empty()) {
            continue;
        }
        let from = parent.join(name);
        let inherited = fs::read_to_string(&from).on("read", &from)?;
        fs::write(&file, inherited.trim()).on("write", &file)?;
    }
    Ok(())
}

fn make_dir(dir: &Path) -> Result<(), CgroupError> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        result => result.on("create", dir),
    }
}

/// Processes of the cgroup and its descendants in any hierarchy, without 0 (a process outside of this PID namespace), 1,
/// and the agent itself.
pub(super) fn pids(layout: &Layout, path: &str) -> BTreeSet<i32> {
    listed_pids(layout, path, MAX_PIDS).collect()
}

/// [`pids`] as the kernel lists them, one process maybe several times, the first `most` of each cgroup. Read line by line, and
/// no further than asked for: a container decides how many there are.
pub(super) fn listed_pids(layout: &Layout, path: &str, most: usize) -> impl Iterator<Item = i32> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let dirs = layout.mounts().into_iter().flat_map(move |mount| tree(&below(mount, path)));
    let files = dirs.filter_map(|dir| fs::File::open(dir.join("cgroup.procs")).ok());
    let lines = files.flat_map(move |listed| io::BufReader::new(listed).lines().map_while(Result::ok).take(most));
    lines.filter_map(|line| line.parse::<i32>().ok()).filter(move |pid| *pid > 1 && *pid != own)
}

/// Removes the cgroup and its descendants in all hierarchies. One that does not exist counts as removed.
pub(super) fn remove(layout: &Layout, path: &str) -> Result<(), CgroupError> {
    let mut first = Ok(());
    for mount in layout.mounts() {
        for dir in tree(&below(mount, path)) {
            let result = match fs::remove_dir(&dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                result => result.on("remove", &dir),
            };
            if first.is_ok() {
                first = result;
            }
        }
    }
    first
}

/// A directory and its descendants, deepest first.
fn tree(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    collect(dir, &mut found);
    found
}

fn collect(dir: &Path, found: &mut Vec<PathBuf>) {
    for inner in dirs_in(dir) {
        collect(&inner, found);
    }
    if dir.is_dir() {
        found.push(dir.to_owned());
    }
}

/// The directories in `dir`; none if it is not readable. A container that may make cgroups gives them any names.
fn dirs_in(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

/// Names of the directories in `dir` that are text; none if it is not readable.
pub(super) fn subdirs(dir: &Path) -> Vec<String> {
    dirs_in(dir).iter().filter_map(|dir| dir.file_name()?.to_str().map(str::to_owned)).collect()
}

impl Layout {
    /// True if cgroups can have this controller: its hierarchy is mounted, or the root of v2 offers it. Reads a file of the
    /// kernel.
    pub fn offers(&self, controller: &str) -> bool {
        match self {
            Self::V2 { mount } => {
                let offered = fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default();
                offered.split_whitespace().any(|offered| offered == controller)
            }
            Self::V1 { controllers, .. } => controllers.contains_key(controller),
        }
    }

    /// True if CPU limits can be enforced: the kernel has quotas (`CONFIG_CFS_BANDWIDTH`). As upstream, v2 is not checked. Looks
    /// for files of the kernel.
    pub fn limits_cpu(&self) -> bool {
        match self {
            Self::V2 { .. } => true,
            Self::V1 { controllers, .. } => {
                let exists = |file: &str| controllers.get("cpu").is_some_and(|mount| mount.join(file).exists());
                exists("cpu.cfs_period_us") && exists("cpu.cfs_quota_us")
            }
        }
    }
}
