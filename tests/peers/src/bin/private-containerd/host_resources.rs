//! Finds and removes what a runtime leaves on the host: processes, mounts, cgroups, files.
//!
//! Runs after the clean-up through CRI, for what remained. Touches only resources with the runtime's names, and never
//! removes files across a mount.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use nix::mount::MntFlags;
use nix::mount::umount2;
use tokio::time::Instant;
use tokio::time::sleep;

use crate::config::Layout;
use crate::processes;
use crate::processes::kill_and_wait;
use crate::shared::LOG_LINKS;

/// Mount point of cgroup v2 on machines without v1.
const UNIFIED: &str = "/sys/fs/cgroup";
/// Generous, for a busy machine.
const DYING_DEADLINE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);

/// The resources of one runtime.
pub(crate) struct HostResources {
    dir: PathBuf,
    config: PathBuf,
    socket: PathBuf,
    cgroup_root: String,
}

impl HostResources {
    /// The resources of a runtime with this layout.
    pub(crate) fn of(layout: &Layout) -> Self {
        Self {
            dir: layout.dir.clone(),
            config: layout.config(),
            socket: layout.socket(),
            cgroup_root: layout.cgroup_root.clone(),
        }
    }

    /// Creates the runtime's cgroup in every hierarchy.
    ///
    /// # Errors
    /// A cgroup cannot be created or initialised.
    pub(crate) fn create_cgroups(&self) -> Result<()> {
        enable_controllers();
        for cgroup in self.cgroups() {
            fs::create_dir(&cgroup).with_context(|| format!("cannot create cgroup {}", cgroup.display()))?;
            // A new cgroup of the v1 cpuset controller has no CPUs, and no process can be moved into it before.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let (own, parent) = (cgroup.join(file), cgroup.join("..").join(file));
                if cgroup.join("cpuset.sched_load_balance").exists() {
                    let value = fs::read(&parent).with_context(|| format!("cannot read {}", parent.display()))?;
                    fs::write(&own, value).with_context(|| format!("cannot write {}", own.display()))?;
                }
            }
        }
        Ok(())
    }

    /// Removes all resources and returns the failures.
    pub(crate) async fn remove(&self) -> Vec<String> {
        let mut failures = Vec::new();
        kill_and_wait(|| self.processes()).await;
        for mount in self.mounts().iter().rev() {
            if let Err(errno) = umount2(mount, MntFlags::MNT_DETACH) {
                failures.push(format!("cannot unmount {}: {errno}", mount.display()));
            }
        }
        for cgroup in self.cgroups() {
            kill_and_wait(|| members(&cgroup)).await;
            if let Err(error) = remove_cgroup(&cgroup).await {
                failures.push(format!("cannot remove cgroup {}: {error}", cgroup.display()));
            }
        }
        for link in self.log_links() {
            if let Err(error) = fs::remove_file(&link) {
                failures.push(format!("cannot remove {}: {error}", link.display()));
            }
        }
        if self.mounts().is_empty()
            && let Err(error) = fs::remove_dir_all(&self.dir)
            && error.kind() != ErrorKind::NotFound
        {
            failures.push(format!("cannot remove {}: {error}", self.dir.display()));
        }
        failures
    }

    /// Resources that still exist.
    pub(crate) fn remaining(&self) -> Vec<String> {
        let mut remaining: Vec<String> = self.processes().into_iter().map(|pid| format!("process {pid}")).collect();
        remaining.extend(self.mounts().iter().map(|mount| format!("mount {}", mount.display())));
        remaining.extend(
            self.cgroups().iter().filter(|path| path.exists()).map(|path| format!("cgroup {}", path.display())),
        );
        remaining.extend(self.log_links().iter().map(|link| format!("link {}", link.display())));
        if self.dir.exists() {
            remaining.push(format!("folder {}", self.dir.display()));
        }
        remaining
    }

    fn processes(&self) -> Vec<i32> {
        processes::of_runtime(&self.config, &self.socket)
    }

    /// The agent's links to container logs, in the folder that log collectors read.
    fn log_links(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(LOG_LINKS) else { return Vec::new() };
        let links = entries.flatten().map(|entry| entry.path());
        links.filter(|link| fs::read_link(link).is_ok_and(|target| target.starts_with(&self.dir))).collect()
    }

    fn mounts(&self) -> Vec<PathBuf> {
        mounts().into_iter().map(|mount| mount.point).filter(|point| point.starts_with(&self.dir)).collect()
    }

    fn cgroups(&self) -> Vec<PathBuf> {
        hierarchies().into_iter().map(|root| root.join(self.cgroup_root.trim_start_matches('/'))).collect()
    }
}

/// Permits cgroups of a machine with v2 only to use all controllers: agents require them in their root cgroup. Best effort,
/// as agents name those that they lack. Nothing to do where the system has done it.
fn enable_controllers() {
    let read = |name: &str| fs::read_to_string(Path::new(UNIFIED).join(name)).unwrap_or_default();
    let (available, enabled) = (read("cgroup.controllers"), read("cgroup.subtree_control"));
    let enabled: Vec<&str> = enabled.split_whitespace().collect();
    for missing in available.split_whitespace().filter(|name| !enabled.contains(name)) {
        let _ = fs::write(Path::new(UNIFIED).join("cgroup.subtree_control"), format!("+{missing}"));
    }
}

/// All processes of a cgroup and its descendants.
fn members(cgroup: &Path) -> Vec<i32> {
    let own = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let mut pids: Vec<i32> = own.lines().filter_map(|line| line.parse().ok()).collect();
    pids.extend(children(cgroup).iter().flat_map(|child| members(child)));
    pids
}

/// Removes a cgroup and its descendants; exiting processes may delay this.
async fn remove_cgroup(cgroup: &Path) -> std::io::Result<()> {
    let mut order = vec![cgroup.to_owned()];
    let mut next = 0;
    while let Some(parent) = order.get(next) {
        order.extend(children(&parent.clone()));
        next += 1;
    }
    let deadline = Instant::now() + DYING_DEADLINE;
    for path in order.iter().rev() {
        loop {
            match fs::remove_dir(path) {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                Err(error) if Instant::now() > deadline => return Err(error),
                Err(_) => sleep(POLL).await,
            }
        }
    }
    Ok(())
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

struct Mount {
    point: PathBuf,
    kind: String,
}

/// Mount points of the cgroup hierarchies.
pub(crate) fn hierarchies() -> Vec<PathBuf> {
    mounts()
        .into_iter()
        .filter(|mount| mount.kind == "cgroup" || mount.kind == "cgroup2")
        .map(|mount| mount.point)
        .collect()
}

fn mounts() -> Vec<Mount> {
    parse_mounts(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

fn parse_mounts(mountinfo: &str) -> Vec<Mount> {
    mountinfo
        .lines()
        .filter_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            let point = PathBuf::from(unescape(before.split(' ').nth(4)?));
            Some(Mount { point, kind: after.split(' ').next()?.to_owned() })
        })
        .collect()
}

/// Decodes the kernel's octal escapes of whitespace and backslashes.
fn unescape(text: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .into_iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_parses_mount_points_and_types() {
        let text = "\
36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
37 35 0:30 / /sys/fs/cgroup/cpu rw,relatime shared:2 master:1 - cgroup cgroup rw,cpu
38 35 0:31 / /a\\040b rw - overlay overlay rw
";
        let read: Vec<(String, String)> =
            parse_mounts(text).into_iter().map(|mount| (mount.point.display().to_string(), mount.kind)).collect();
        let expected = [("/mnt2", "ext3"), ("/sys/fs/cgroup/cpu", "cgroup"), ("/a b", "overlay")];
        assert_eq!(read, expected.map(|(point, kind)| (point.to_owned(), kind.to_owned())));
    }
}
