//! Reads what the machine uses beside its cgroups: memory and processes as a whole, disks, network. Keeps no samples:
//! rates are computed by the reader. Blocks; [`TreeWalk`] for as long as the caller permits.

mod available;
mod disk;
mod file_system;
mod machine;
mod network;
mod tree;

pub use available::AvailableMemory;
pub use disk::DiskUsage;
pub use file_system::Disk;
pub use file_system::FileSystem;
pub use file_system::MeasuredBy;
pub use machine::Machine;
pub use machine::ProcessCounts;
pub use network::InterfaceUsage;
pub use network::interfaces_of;
pub use tree::TreeUsage;
pub use tree::TreeWalk;
