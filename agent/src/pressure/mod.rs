//! Pressure stall information (PSI) of the node, QoS classes and pods, and what follows from it.
//!
//! ```text
//!  trigger fired, totals ─▶ level                    entered and left, with hysteresis
//!  /proc/pressure, vmstat, cgroup files ─▶ read ─▶ sample ─▶ tracker ─▶ evidence ─▶ decide ─▶ relax, evict or neither
//!  BPF counters ─▶ reclaim ───────────────────────────┘
//! ```
//!
//! Only `read` and `reclaim` access the node; the rest is pure. `level`, `tracker` and `decide` take the time as an
//! argument and return the same for the same samples, which recorded traces show. Waiting that a pod's own limit causes is
//! recognised (`own_limit`, `decide`) and never acted on.

mod decide;
mod evidence;
mod level;
pub mod own_limit;
mod read;
mod reclaim;
mod sample;
mod stall_history;
#[cfg(test)]
mod tests;
mod tracker;

pub use decide::Evict;
pub use decide::PolicyDecision;
pub use decide::Relax;
pub use evidence::Evidence;
pub use evidence::PodEvidence;
pub use level::Crossing;
pub use level::Level;
pub use read::PodPlace;
pub use read::PressureReader;
pub use read::pressure_file;
pub use reclaim::ReclaimStalls;
pub use reclaim::StallCounters;
pub use sample::NodeSample;
pub use sample::PodSample;
pub use tracker::Finding;
pub use tracker::Tracker;
