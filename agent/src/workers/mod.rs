//! Pod workers: one state machine per pod, the only part that creates, starts, stops or removes containers.
//!
//! ```text
//!  sync loop ─▶ pod_workers ─▶ mailbox (state) ─▶ worker ─▶ plan (pure) ─▶ act (effects)
//!                                                   ▲                        │
//!                                 pleg: inspection ─┴────────────────────────┘
//! ```

pub mod act;
mod active_deadline;
pub mod backoff;
pub mod generate;
pub mod mailbox;
mod pass_metrics;
pub mod plan;
pub mod pod_workers;
mod publish;
pub mod registry;
pub mod state;
pub mod static_pod_start_queue;
mod sync_state;
mod syncing;
mod terminating;
mod volume_refresh;
pub mod worker;
