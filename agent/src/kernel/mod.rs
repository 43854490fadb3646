//! The machine: kernel probes, processes, cgroup hierarchies and what the node offers.
//!
//! Owns every touch of the kernel that is not a cgroup's settings (those are in `cgroup`). Reads and reports, decides
//! nothing, knows nothing of pods. Each part may be missing on a node; then it says so with one reason and the agent
//! runs on.
//!
//! ```text
//!  btf ─▶ bpf::offsets ─▶ bpf::load ─▶ probes in the kernel
//!                                        │ ring buffers
//!  pidfd · proc ─▶ pinned processes      ▼
//!  hierarchy ───▶ cgroup ids ─▶ index ◀─ bpf::Records ─▶ events
//! ```

pub mod bpf;
pub mod btf;
pub mod cgroup;
pub mod clock;
pub mod facts;
pub mod hierarchy;
pub mod index;
pub mod memory;
pub mod pidfd;
pub mod proc;
pub mod selinux;
pub mod sysctl;
pub mod usage;
