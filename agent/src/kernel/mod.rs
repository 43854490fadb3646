//! The machine: kernel probes, processes, usage, and what the kernel offers. Reads and reports only. Each part may be
//! missing on a node; then it returns one reason and the agent runs without it.
//!
//! ```text
//!  btf ─▶ bpf::offsets ─▶ bpf::load ─▶ probes in the kernel
//!                                        │ ring buffers
//!  pidfd · proc ─▶ pinned processes      ▼
//!  cgroups ──▶ cgroup ids ──▶ index ◀─ bpf::Records ─▶ events
//! ```

pub mod bpf;
pub mod btf;
pub mod clock;
pub mod facts;
pub mod index;
pub mod kmsg;
pub mod listing;
pub mod local_time;
pub mod memory;
pub mod oom_log;
pub mod oom_score;
pub mod open_files;
pub mod pidfd;
pub mod proc;
pub mod program_pages;
pub mod project_quota;
pub mod psi;
pub mod read;
pub mod selinux;
pub mod sysctl;
pub mod usage;
pub mod vmstat;
