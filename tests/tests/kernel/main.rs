//! Probes, pidfds and cgroups of the running kernel.
//!
//! Needs root, BTF and a mounted cgroup hierarchy. Without them the tests are skipped, which fails with `CI=true`.
//! Every test has cgroups and processes of its own and removes them.

mod bpf;
mod support;
