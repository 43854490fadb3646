//! Reads what the machine and its cgroups use: processor, memory, pressure, disks, network.
//!
//! Owns the files and their formats under cgroup v1 and v2. Refuses to remember: rates are made by who keeps samples.
//! All of it blocks, though only for the kernel: nothing here reads a disk.

mod cgroup;
mod detail;
mod disk;
mod machine;
mod network;
mod pressure;

pub use cgroup::CgroupPlace;
pub use cgroup::CgroupUsage;
pub use cgroup::MemoryUsage;
pub use detail::CgroupDetail;
pub use detail::DiskTraffic;
pub use detail::MemoryDetail;
pub use detail::Throttling;
pub use disk::DiskUsage;
pub use disk::tree_usage;
pub use machine::Machine;
pub use machine::ProcessCounts;
pub use network::InterfaceUsage;
pub use network::interfaces_of;
pub use pressure::Pressure;
pub use pressure::PressureLine;
