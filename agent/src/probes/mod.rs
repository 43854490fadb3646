//! Results of probes: a prober publishes them, pod workers and statuses read them. Probes nothing itself.

mod results;

pub use results::ProbeResultStore;
