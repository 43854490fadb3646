//! Agent, real container runtime and real processes: each test starts a private containerd and ends with it.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

mod admission;
mod capabilities;
mod cgroups;
mod eviction;
mod fc;
mod files;
mod flex_volume;
mod garbage_collection;
mod hooks;
mod images;
mod input;
mod iptables;
mod iscsi;
mod local;
mod log_rotation;
mod nfs;
mod node_allocatable;
mod observe;
mod oom;
mod pod_fields;
mod pod_security;
mod probes;
mod project_quotas;
mod pulls;
mod restarts;
mod sidecars;
mod storage;
mod systemd;
mod user_namespaces;
mod volumes;
mod worker_actions;
