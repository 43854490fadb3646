//! Peers for tests that need more than one crate: a simulated container runtime, the agent on a simulated node, and the
//! agent as a process on a real runtime.

pub mod agent;
pub mod cri;
pub mod node;
