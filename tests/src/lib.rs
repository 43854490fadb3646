//! Tests.

pub mod containerd;
//! Peers for tests that need more than one crate: so far, a simulated container runtime.

pub mod cri;
