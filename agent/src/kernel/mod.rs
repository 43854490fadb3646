//! The machine: kernel interfaces, read and written without policy.

pub mod cgroup;
