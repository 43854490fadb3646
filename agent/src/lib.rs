//! keblet: a Kubernetes node agent driven by events. This page is the map.
//!
//! ```text
//!  apiserver ─▶ sources ───────────────┐
//!  kernel ─┬─▶ events ─▶ pleg ─────────┼─▶ sync ─▶ workers ─▶ runtime · images · volumes · cgroups
//!  runtime ┘                           │              │
//!                                      └──────────────┴─▶ status · metrics · server
//! ```

pub mod config;
pub mod events;
pub mod images;
pub mod kernel;
pub mod model;
pub mod pleg;
pub mod recorder;
pub mod runtime;
pub mod volumes;
pub mod workers;
