//! Pod statuses. `generate` is a pure function of spec, snapshot and previous status; `StatusStore` caches the result.
//! Neither calls the API server; only `manager` does, if there is one.
//!
//! ```text
//!  snapshot ─▶ containers ─▶ phase ─▶ conditions ─▶ PodStatus ─▶ store ─▶ (API, probes, servers)
//!                  ▲                      ▲                        │
//!                  └──────────────────────┴──── previous status ───┘
//! ```

mod addresses;
mod api_view;
mod conditions;
mod containers;
mod final_status;
mod generate;
pub mod manager;
mod phase;
mod readiness;
mod rejection;
mod resources;
mod state;
mod statuses;
mod store;
mod termination_reason;
#[cfg(test)]
mod tests;
mod time;
mod transition;

pub use api_view::ApiCopies;
pub use api_view::ApiStatusView;
pub use generate::DEADLINE_EXCEEDED;
pub use generate::DEADLINE_MESSAGE;
pub use generate::NodeAddresses;
pub use generate::ResizeView;
pub use generate::StatusInput;
pub use generate::generate;
pub use statuses::PodObservations;
pub use statuses::Statuses;
pub use store::StatusStore;
pub use store::Stored;
pub use termination_reason::TerminationReason;
pub use transition::IllegalTransition;
