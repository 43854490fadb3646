//! The kernel side for real: probes, pidfds and cgroups of the machine the tests run on.
//!
//! Needs root, BTF and a mounted cgroup hierarchy. Where the machine lacks one of them the tests say so and pass, unless
//! `CI` is set. Every test has cgroups and processes of its own and removes them.

mod bpf;
mod support;
