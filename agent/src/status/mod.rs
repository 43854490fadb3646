//! The status of pods: what is said of them, and what was said last. `generate` is a pure function of spec,
//! snapshot and the status before; `StatusStore` keeps the result and refuses transitions that must not be. Neither
//! sends anything anywhere.
//!
//! ```text
//!  snapshot ─▶ containers ─▶ phase ─▶ conditions ─▶ PodStatus ─▶ store ─▶ (API, probes, servers)
//!                  ▲                      ▲                        │
//!                  └──────────────────────┴──── the status before ─┘
//! ```

mod addresses;
mod board;
mod conditions;
mod containers;
mod generate;
mod phase;
mod state;
mod store;
mod termination;
#[cfg(test)]
mod tests;
mod time;
mod transition;

pub use board::Knowledge;
pub use board::Statuses;
pub use generate::NodeAddresses;
pub use generate::StatusInput;
pub use generate::generate;
pub use store::StatusStore;
pub use store::Stored;
pub use transition::IllegalTransition;
