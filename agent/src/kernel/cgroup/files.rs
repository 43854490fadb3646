//! Files and directories of one cgroup, v1 and v2: making, writing, removing. Synchronous; each call takes
//! microseconds, because the kernel's tree lives in memory.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;

use super::CgroupError;
use super::Layout;
use super::PodValues;
use super::arith;
use super::error::OnPath as _;
use super::layout::below;

/// True if the cgroup is there in every hierarchy that matters.
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

/// Controllers (v2) or directories (v1) that a complete cgroup would have and this one has not.
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

/// Makes the cgroup and every missing one above it, in all hierarchies.
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

/// Directories level by level; on the way down each level hands its controllers to the next.
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

/// Not every controller can always be enabled (a thread domain, a kernel option): what works, works; a lack shows
/// when the cgroup is checked.
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

/// A new cpuset of v1 is empty, and no process may enter it then.
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

/// Writes `values`, all of them even if one fails; returns the first failure.
pub(super) fn write_values(layout: &Layout, path: &str, values: &PodValues) -> Result<(), CgroupError> {
    let mut first = Ok(());
    for (controller, name, value) in files_of(layout.is_v2(), values) {
        let Some(mount) = layout.mount_of(controller) else { continue };
        let dir = below(mount, path);
        if layout.is_v2() && !has_controller(&dir, controller) {
            continue;
        }
        let file = dir.join(name);
        let result = fs::write(&file, value).on("write", &file);
        if first.is_ok() {
            first = result;
        }
    }
    first
}

fn has_controller(dir: &Path, controller: &str) -> bool {
    fs::read_to_string(dir.join("cgroup.controllers")).is_ok_and(|all| all.split_whitespace().any(|c| c == controller))
}

/// Controller, file and text of each value. Values of zero are left to the kernel.
fn files_of(is_v2: bool, values: &PodValues) -> Vec<(&'static str, String, String)> {
    let mut files = Vec::new();
    let mut file =
        |controller: &'static str, name: &str, value: String| files.push((controller, name.to_owned(), value));
    let pids = values.pids.map(|limit| if limit < 0 { "max".to_owned() } else { limit.max(1).to_string() });
    if is_v2 {
        if values.cpu_shares > 0 {
            file("cpu", "cpu.weight", arith::weight(values.cpu_shares).to_string());
        }
        if let Some((quota, period)) = values.cpu_max.filter(|(quota, _)| *quota != 0) {
            let quota = if quota < 0 { "max".to_owned() } else { quota.to_string() };
            file("cpu", "cpu.max", format!("{quota} {period}"));
        }
    } else {
        if values.cpu_shares > 0 {
            file("cpu", "cpu.shares", values.cpu_shares.to_string());
        }
        if let Some((quota, period)) = values.cpu_max {
            file("cpu", "cpu.cfs_period_us", period.to_string());
            if quota != 0 {
                file("cpu", "cpu.cfs_quota_us", quota.to_string());
            }
        }
    }
    if let Some(bytes) = values.memory_max.filter(|bytes| *bytes > 0) {
        file("memory", if is_v2 { "memory.max" } else { "memory.limit_in_bytes" }, bytes.to_string());
    }
    if let Some(pids) = pids {
        file("pids", "pids.max", pids);
    }
    for (size, bytes) in &values.hugepages {
        let size = arith::page_size_name(*size);
        let name = if is_v2 { format!("hugetlb.{size}.max") } else { format!("hugetlb.{size}.limit_in_bytes") };
        file("hugetlb", &name, bytes.to_string());
    }
    files
}

/// Processes in the cgroup and below it, in any hierarchy. Never 0 (a process of another namespace), 1, or this one.
pub(super) fn pids(layout: &Layout, path: &str) -> BTreeSet<i32> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let mut pids = BTreeSet::new();
    for mount in layout.mounts() {
        for dir in tree(&below(mount, path)) {
            let listed = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            pids.extend(listed.lines().filter_map(|line| line.parse::<i32>().ok()));
        }
    }
    pids.retain(|pid| *pid > 1 && *pid != own);
    pids
}

/// Removes the cgroup and everything below it, in all hierarchies. What is not there counts as removed.
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

/// A directory and those below it, deepest first.
fn tree(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    collect(dir, &mut found);
    found
}

fn collect(dir: &Path, found: &mut Vec<PathBuf>) {
    for name in subdirs(dir) {
        collect(&dir.join(name), found);
    }
    if dir.is_dir() {
        found.push(dir.to_owned());
    }
}

/// Names of the directories in `dir`; none if it cannot be read.
pub(super) fn subdirs(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values() -> PodValues {
        PodValues {
            cpu_shares: 1024,
            cpu_max: Some((50_000, 100_000)),
            memory_max: Some(64 << 20),
            pids: Some(100),
            hugepages: [(2 << 20, 0)].into(),
        }
    }

    fn texts(is_v2: bool, values: &PodValues) -> Vec<String> {
        files_of(is_v2, values).into_iter().map(|(_, name, value)| format!("{name}={value}")).collect()
    }

    #[test]
    fn values_by_version() {
        assert_eq!(
            texts(true, &values()),
            ["cpu.weight=39", "cpu.max=50000 100000", "memory.max=67108864", "pids.max=100", "hugetlb.2MB.max=0"]
        );
        assert_eq!(
            texts(false, &values()),
            [
                "cpu.shares=1024",
                "cpu.cfs_period_us=100000",
                "cpu.cfs_quota_us=50000",
                "memory.limit_in_bytes=67108864",
                "pids.max=100",
                "hugetlb.2MB.limit_in_bytes=0"
            ]
        );
    }

    #[test]
    fn no_limit_is_spelled_by_version() {
        let none = PodValues { cpu_shares: 2, cpu_max: Some((-1, 100_000)), pids: Some(-1), ..PodValues::default() };
        assert_eq!(texts(true, &none), ["cpu.weight=1", "cpu.max=max 100000", "pids.max=max"]);
        assert_eq!(texts(false, &none)[2], "cpu.cfs_quota_us=-1");
        assert_eq!(texts(true, &PodValues { pids: Some(0), ..PodValues::default() }), ["pids.max=1"]);
        assert_eq!(texts(true, &PodValues::default()), Vec::<String>::new());
    }
}
