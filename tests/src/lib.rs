//! Peers for tests that need more than one crate: a simulated container runtime, the agent on a simulated node, the agent
//! as a process on a real runtime or as a service of a real systemd, the agent as a node of a real cluster, and what `deploy`
//! installs in one.

pub mod cgroups;
pub mod cluster;
pub mod cri;
pub mod deploy;
pub mod machine;
pub mod node;
pub mod observer;
pub mod pulls;
pub mod quota_disk;
pub mod registry;
pub mod seeds;
pub mod standalone;
