//! Pod workers: one state machine per pod, the only part that creates, starts, stops or removes containers.
//!
//! ```text
//!  sync loop ─▶ pod_workers ─▶ mailbox (state) ─▶ worker ─▶ plan (pure) ─▶ act (effects)
//!                                                   ▲                        │
//!                                 pleg: inspection ─┴────────────────────────┘
//! ```

pub mod act;
pub mod backoff;
pub mod burials;
mod counted;
mod ending;
pub mod gate;
pub mod generate;
pub mod mailbox;
pub mod plan;
pub mod pod_workers;
pub mod refuse;
pub mod roster;
pub mod state;
mod syncing;
mod upkeep;
pub mod worker;
