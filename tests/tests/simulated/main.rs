//! The agent, or one part of it, on simulated runtimes, kernels and API servers: paused time, seeded faults, any machine.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

mod admission;
mod admission_resources;
mod agent;
mod claims;
mod eviction;
mod eviction_records;
mod foreign_status;
mod garbage_collection;
mod hanging_api;
mod hooks;
mod housekeeping;
mod log_followers;
mod metrics;
mod node_pressure;
mod oom;
mod path_safety;
mod pleg;
mod pod_timing;
mod pressure;
mod probe_results;
mod probes;
mod random;
mod resize;
mod resources;
mod restart_all;
mod retries;
mod runtime;
mod sandbox_teardown;
mod sidecars;
mod watch;
