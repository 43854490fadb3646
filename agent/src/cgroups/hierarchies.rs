//! The node's cgroup hierarchies, read once at start and shared by all that create, limit, measure or identify cgroups.

use std::fs;
use std::path::Path;

use nix::sys::statfs;

use super::CgroupError;
use super::Hierarchy;
use super::Layout;
use super::error::OnPath as _;
use crate::filesystem::read_mounts;

/// What is mounted at this path decides between the versions, as in the kubelet (libcontainer's `IsCgroup2UnifiedMode`).
const MOUNT_POINT: &str = "/sys/fs/cgroup";
const MOUNTINFO: &str = "/proc/self/mountinfo";
const MEMBERSHIPS: &str = "/proc/self/cgroup";

/// The cgroup hierarchies of a node. Does not change while the agent runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchies {
    /// Mount points by controller.
    pub layout: Layout,
    /// The hierarchy in which containers are identified; `None` if neither memory, pids nor cgroup v2 is mounted.
    pub containers: Option<Hierarchy>,
    /// Swap of containers can be limited (KEP-2400).
    pub limits_swap: bool,
}

impl Hierarchies {
    /// Reads this node's hierarchies.
    ///
    /// # Errors
    /// No hierarchy is mounted, or the agent's own `mountinfo` or `cgroup` file is not readable.
    pub fn detect() -> Result<Self, CgroupError> {
        let mount = Path::new(MOUNT_POINT);
        let kind = statfs::statfs(mount).map_err(std::io::Error::from).on("inspect", mount)?.filesystem_type();
        let (mounts, memberships) = (Path::new(MOUNTINFO), Path::new(MEMBERSHIPS));
        let mounts = read_mounts(mounts).on("read", mounts)?;
        let memberships = fs::read_to_string(memberships).on("read", memberships)?;
        let layout = if kind == statfs::CGROUP2_SUPER_MAGIC {
            Layout::V2 { mount: mount.to_owned() }
        } else {
            Layout::from_mounts(&mounts).ok_or(CgroupError::NotMounted)?
        };
        let containers = Hierarchy::choose(&mounts, &memberships);
        let limits_swap = containers.as_ref().is_some_and(|hierarchy| hierarchy.limits_swap(&memberships));
        Ok(Self { layout, containers, limits_swap })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::HierarchyKind;

    #[test]
    fn all_views_of_this_node_agree() {
        let found = Hierarchies::detect().expect("the machine has cgroups");
        let containers = found.containers.expect("memory, pids or v2 is mounted");
        assert_eq!(found.layout.is_v2(), containers.kind == HierarchyKind::Unified);
        if let HierarchyKind::V1(controller) = containers.kind {
            assert_eq!(found.layout.mount_of(controller.as_str()), Some(containers.mount.as_path()));
        }
    }
}
