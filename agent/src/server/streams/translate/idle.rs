//! The idle timeout of a session.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

/// A session without data for this time ends (`streamingConnectionIdleTimeout`'s default).
pub(super) const IDLE: Duration = Duration::from_secs(4 * 60 * 60);

/// The time of the last data, shared by both directions.
pub(super) struct IdleTimer {
    begin: Instant,
    last: AtomicU64,
}

impl Default for IdleTimer {
    fn default() -> Self {
        Self { begin: Instant::now(), last: AtomicU64::new(0) }
    }
}

impl IdleTimer {
    /// Data was transferred. Pings do not count.
    pub(super) fn touch(&self) {
        let now = u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    /// Returns when the session was idle for the timeout.
    pub(super) async fn ended(&self) {
        loop {
            let end = self.begin + Duration::from_millis(self.last.load(Ordering::Relaxed)) + IDLE;
            if Instant::now() >= end {
                return;
            }
            tokio::time::sleep_until(end).await;
        }
    }
}
