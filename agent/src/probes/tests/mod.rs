//! The state of one probe, and the table of all.

mod state;
mod table;

use std::time::Duration;

use tokio::time::Instant;

/// So many seconds after `origin`.
fn after(origin: Instant, seconds: f64) -> Instant {
    origin + Duration::from_secs_f64(seconds)
}
