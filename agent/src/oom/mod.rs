//! Verdicts on OOM kills: which process of which container was killed, and whose limit was exceeded.
//!
//! ```text
//!  probe record ──┐
//!  kill counter ──┼─▶ OomRecord ─▶ pleg adds the container ─▶ verdict ─▶ reporter: event · metrics · log · subscribers
//!  kernel log ────┘                                              └─▶ history ─▶ reason of the container's exit
//! ```
//!
//! Decides and reports; takes evidence from the sensors (`events`), and reads no pod specs. `docs/oom.md` describes what is
//! decided from what.

mod counts;
mod history;
mod kill_counters;
mod message;
mod report;
pub mod verdict;

pub use counts::OomCounts;
pub use counts::OomEvents;
pub use history::OomHistory;
pub use kill_counters::CounterChange;
pub use kill_counters::KillCounters;
pub use report::OomReporter;
pub use report::PodLookup;
