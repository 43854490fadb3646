//! The cgroup tree of pods: `kubepods`, the QoS classes, one cgroup per pod; cgroup v1 (hybrid too) and v2, directly or
//! through systemd. Names, arithmetic and file contents are pure; `tree` does what is to be done.
//!
//! Refuses to know pods' specs: values come in ready to write. Containers' own cgroups are the runtime's.

pub mod arith;
mod error;
mod files;
mod layout;
mod name;
mod systemd;
#[cfg(test)]
mod tests;
mod tree;
mod values;

pub use error::CgroupError;
pub use layout::Layout;
pub use name::CgroupName;
pub use name::CgroupNameError;
pub use name::QosClass;
pub use name::pod_uid_of;
pub use tree::Cgroups;
pub use values::PodValues;

/// Who makes cgroups, and how they are named.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Driver {
    /// Directories, made directly.
    Cgroupfs,
    /// Slices, made by systemd.
    Systemd,
}
