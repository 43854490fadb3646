//! Holds back the teardown of a sandbox whose containers have exited on their own until the API server has their status:
//! what waits for the end of a pod waits for the status, nobody for the sandbox, and its teardown takes the processors from
//! the request.

use std::time::Duration;

use tokio::time::timeout;

/// Longest time a teardown is held back.
const MAX_HOLD: Duration = Duration::from_millis(50);

/// Whether teardowns are held back.
#[derive(Clone, Copy, Debug)]
pub struct TeardownHold {
    enabled: bool,
}

impl TeardownHold {
    pub(super) fn new(enabled: bool) -> Self {
        Self { enabled }
    }

    /// Waits until the status is `sent`, no longer than [`MAX_HOLD`].
    pub async fn released(&self, sent: impl Future<Output = ()>) {
        if self.enabled {
            // Past the bound the sandbox is torn down all the same.
            let _ = timeout(MAX_HOLD, sent).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;
    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_teardown_waits_for_the_status_and_no_longer_than_50_ms() {
        let (hold, start) = (TeardownHold::new(true), Instant::now());
        hold.released(sleep(Duration::from_millis(8))).await;
        assert_eq!(start.elapsed(), Duration::from_millis(8));
        hold.released(pending()).await;
        assert_eq!(start.elapsed(), Duration::from_millis(58));
    }

    #[tokio::test(start_paused = true)]
    async fn a_disabled_policy_holds_nothing() {
        let start = Instant::now();
        TeardownHold::new(false).released(pending()).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
