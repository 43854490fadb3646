//! The status of pods: what is said of them, and what was said last. `generate` is a pure function of spec,
//! snapshot and the status before; `StatusStore` keeps the result and refuses transitions that must not be. Neither
//! sends anything anywhere; `manager` alone does, if there is an API server.
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
mod ending;
mod generate;
pub mod manager;
mod phase;
mod side;
mod state;
mod store;
mod termination;
#[cfg(test)]
mod tests;
mod time;
mod transition;

pub use board::Knowledge;
pub use board::Statuses;
pub use ending::Ending;
pub use generate::NodeAddresses;
pub use generate::StatusInput;
pub use generate::generate;
pub use side::ApiCopies;
pub use side::ApiSide;
pub use store::StatusStore;
pub use store::Stored;
pub use transition::IllegalTransition;
