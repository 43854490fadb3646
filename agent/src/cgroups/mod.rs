//! Cgroups of the node: one model of its hierarchies, found once at start, for cgroup v1, hybrid and v2 and for both
//! cgroup drivers.
//!
//! ```text
//!  mountinfo ─▶ hierarchies ─▶ layout (mount points) ─▶ usage   reads what a cgroup uses
//!                        │                          └─▶ manager kubepods, pods; cgroups of others
//!                        └▶ hierarchy (path ↔ id)       qos     QoS classes
//!                             of containers       daemons ├─▶ files    directories, processes
//!                                                         ├─▶ current  values that are there
//!                                                         ├─▶ freezer  suspends a pod, through `cgroups-rs`
//!                                                         ├─▶ limits   values, likewise
//!                                                         ├─▶ limited  pods whose cgroups have got theirs
//!                                                         ├─▶ memory_high  soft limits that are raised
//!                                                         └─▶ systemd  slices, over D-Bus
//! ```
//!
//! Names, arithmetic and layouts are pure. Values arrive ready to be written: this module reads no pod spec. Cgroups of
//! containers belong to the runtime.

pub mod arithmetic;
mod current;
mod daemons;
mod error;
mod files;
mod freezer;
mod hierarchies;
mod hierarchy;
mod layout;
mod limit_writes;
mod limited;
mod limits;
mod manager;
pub mod memory_high;
mod mountinfo;
mod name;
mod qos;
mod requested;
mod resize;
mod signals;
mod systemd;
mod systemd_socket;
#[cfg(test)]
mod tests;
pub mod usage;
mod values;

pub use daemons::DaemonCgroup;
pub use error::CgroupError;
pub use hierarchies::Hierarchies;
pub use hierarchy::CgroupId;
pub use hierarchy::Controller;
pub use hierarchy::Hierarchy;
pub use hierarchy::HierarchyError;
pub use hierarchy::HierarchyKind;
pub use layout::Layout;
pub use limit_writes::LimitWrites;
pub use manager::Cgroups;
pub use name::CgroupName;
pub use name::CgroupNameError;
pub use name::class_paths;
pub use name::pod_uid_of;
pub use qos::QosPolicy;
pub use qos::ReservedMemory;
pub use requested::PodRequests;
pub use requested::Requested;
pub use resize::Change;
pub use resize::PodChanges;
pub use resize::PodLimits;
pub use values::CgroupValues;
pub use values::UNLIMITED;

/// `cgroupDriver`: how cgroups are named and created.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Driver {
    /// Directories, created by the agent and the runtime.
    Cgroupfs,
    /// Slices and scopes, created by systemd.
    Systemd,
}
