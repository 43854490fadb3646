//! The cgroup tree of pods: `kubepods`, the QoS classes, one cgroup per pod.

pub mod arith;
mod name;
mod values;

pub use name::CgroupName;
pub use name::CgroupNameError;
pub use name::QosClass;
pub use name::pod_uid_of;
pub use values::PodValues;

/// Who makes cgroups, and how they are named.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Driver {
    /// Directories, made directly.
    Cgroupfs,
    /// Slices, made by systemd.
    Systemd,
}
