//! Tests.

pub mod containerd;
