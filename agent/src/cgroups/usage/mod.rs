//! Reads what cgroups use: CPU time, memory, processes, pressure, input and output, with cgroup v1 and v2. Keeps no
//! samples: rates are computed by the reader. Blocks, but reads no disk.

mod basic;
mod counters;
mod detail;
mod file;
mod place;
mod pressure;

pub use basic::CgroupUsage;
pub use basic::FileCounters;
pub use basic::MemoryUsage;
pub use basic::ReclaimCounters;
pub use basic::Throttling;
pub use counters::CgroupCounters;
pub use detail::CgroupDetail;
pub use detail::CgroupLimits;
pub use detail::DiskTraffic;
pub use detail::MemoryDetail;
pub use place::CgroupPlace;
pub use place::OpenCgroup;
pub use pressure::CgroupStalls;
pub use pressure::Pressure;
pub use pressure::PressureLine;
