//! Probes of containers (startup, readiness, liveness): when each is due, running it, what its runs mean, and the results,
//! which pod workers and statuses read. Restarts nothing and changes no status.
//!
//! A worker reports running containers to the prober before it publishes their status, so a container with a probe has a
//! result whenever it is visible. Results are those of one container instance.

mod initial;
mod prober;
mod results;
mod run;
mod state;
mod table;
mod target;
#[cfg(test)]
mod tests;

pub use prober::Parts;
pub use prober::ProbedPods;
pub use prober::Prober;
pub use results::ProbeResultStore;
pub use run::Expand;
