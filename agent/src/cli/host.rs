//! What the configuration's checks have to know of this machine.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use crate::config::HostFacts;

/// Looks at this machine.
pub fn facts() -> HostFacts {
    HostFacts {
        cgroup_v1: is_cgroup_v1(Path::new("/sys/fs/cgroup")),
        swap_active: swap_active(&fs::read_to_string("/proc/swaps").unwrap_or_default()),
    }
}

/// The name of this node: `--hostname-override`, or the hostname; trimmed and in lower case.
pub fn node_name(hostname_override: &str) -> anyhow::Result<String> {
    let name = match hostname_override {
        "" => nix::unistd::gethostname().context("cannot read the hostname")?.to_string_lossy().into_owned(),
        name => name.to_owned(),
    };
    let name = name.trim().to_lowercase();
    ensure!(!name.is_empty(), "the hostname is empty; name the node by --hostname-override");
    Ok(name)
}

/// Anything but a cgroup v2 file system counts as v1, hybrid hosts included.
fn is_cgroup_v1(root: &Path) -> bool {
    statfs(root).map_or(true, |stat| stat.filesystem_type() != CGROUP2_SUPER_MAGIC)
}

/// `/proc/swaps` has a heading and a line per swap area.
fn swap_active(swaps: &str) -> bool {
    swaps.lines().skip(1).any(|line| !line.trim().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_areas() {
        let heading = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        assert!(!swap_active(""));
        assert!(!swap_active(heading));
        assert!(swap_active(&format!("{heading}/dev/sda2  partition  8388604  0  -2\n")));
    }

    #[test]
    fn node_names() {
        assert_eq!(node_name(" Node-1 ").unwrap(), "node-1");
        assert!(node_name("  ").is_err());
        assert!(!node_name("").unwrap().is_empty());
    }

    #[test]
    fn other_file_systems_are_v1() {
        assert!(is_cgroup_v1(Path::new("/proc")));
        assert!(is_cgroup_v1(Path::new("/nonexistent")));
    }
}
