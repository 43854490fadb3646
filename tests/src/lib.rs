//! What tests of more than one room need: a simulated container runtime, and a real one.

pub mod containerd;
pub mod cri;
