//! Reads what the machine uses beside its cgroups: memory and processes as a whole, disks, network. Keeps no samples:
//! rates are computed by the reader. Blocks; [`tree_usage`] for as long as the tree is large.

mod disk;
mod machine;
mod network;

pub use disk::DiskUsage;
pub use disk::TreeUsage;
pub use disk::tree_usage;
pub use disk::tree_usage_while;
pub use machine::Machine;
pub use machine::ProcessCounts;
pub use network::InterfaceUsage;
pub use network::interfaces_of;
