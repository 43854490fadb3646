//! Probes loaded into the running kernel. Ignored by a plain `cargo test`; `cargo xtask test` runs what has `bpf` in its
//! name where the machine can.

mod degraded;
mod exits;
mod oom;
mod oom_evidence;
mod overflow;
mod pids;
mod verifier;
