//! Peers for tests that need more than one crate: a simulated container runtime, and the agent on a simulated node.

pub mod cri;
pub mod node;
