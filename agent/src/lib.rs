//! keblet: a Kubernetes node agent driven by events. ARCHITECTURE.md describes the modules and the rules between them.
//!
//! ```text
//!  apiserver ─▶ sources ───────────────┐
//!  kernel ─┬─▶ events ─▶ pleg ─────────┼─▶ sync ─▶ workers ─▶ runtime · images · volumes · cgroups
//!  runtime ┘                           │              │
//!                                      └──────────────┴─▶ status · metrics · server
//! ```

pub mod admission;
pub mod allocatable;
pub mod allocation;
pub mod apiserver;
pub mod certificates;
pub mod cgroups;
pub mod cli;
pub mod config;
pub mod events;
pub mod eviction;
pub mod exit;
pub mod filesystem;
pub mod host_program;
pub mod http_get;
pub mod images;
pub mod iptables;
pub mod kernel;
pub mod log_format;
pub mod log_rotation;
pub mod metrics;
pub mod model;
pub mod node;
pub mod objects;
pub mod observe;
pub mod oom;
pub mod pacing;
pub mod pipeline;
pub mod pleg;
pub mod pressure;
pub mod probes;
pub mod proxy;
pub mod recorder;
pub mod retry;
pub mod runtime;
pub mod server;
pub mod sources;
pub mod startup;
pub mod stats;
pub mod status;
pub mod sync;
pub mod systemd;
pub mod telemetry;
pub mod user_namespaces;
pub mod volumes;
pub mod wiring;
pub mod workers;
