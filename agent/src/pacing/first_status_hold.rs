//! Holds back the first status of a pod while containers are being started: it may be `Running` a moment later, and then
//! one request to the API server suffices.

use std::time::Duration;

use tokio::time::Instant;
use tokio::time::sleep_until;

use super::Priority;

/// Longest time a first status is held back.
const MAX_HOLD: Duration = Duration::from_millis(200);

/// Whether first statuses are held back.
#[derive(Clone, Debug)]
pub struct FirstStatusHold {
    enabled: bool,
    priority: Priority,
}

impl FirstStatusHold {
    pub(super) fn new(enabled: bool, priority: Priority) -> Self {
        Self { enabled, priority }
    }

    /// When a first status that is due now is sent at the latest.
    pub fn deadline(&self) -> Instant {
        Instant::now() + MAX_HOLD
    }

    /// True if a first status with this deadline is to be held back now.
    pub fn holds(&self, deadline: Instant) -> bool {
        self.enabled && !self.priority.is_idle() && Instant::now() < deadline
    }

    /// Waits until a status with this deadline is no longer held back. Cancel-safe.
    pub async fn released(&self, deadline: Instant) {
        tokio::select! {
            () = self.priority.idle() => {}
            () = sleep_until(deadline) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_first_status_is_held_until_idle_and_no_longer_than_200_ms() {
        let priority = Priority::default();
        let hold = FirstStatusHold::new(true, priority.clone());
        let start = Instant::now();
        let deadline = hold.deadline();
        assert!(!hold.holds(deadline), "nothing is in progress");
        let guard = priority.raise();
        assert!(hold.holds(deadline));
        hold.released(deadline).await;
        assert_eq!(start.elapsed(), Duration::from_millis(200));
        assert!(!hold.holds(deadline));
        let deadline = hold.deadline();
        drop(guard);
        hold.released(deadline).await;
        assert_eq!(start.elapsed(), Duration::from_millis(200), "released as soon as nothing is in progress");
    }

    #[tokio::test(start_paused = true)]
    async fn a_disabled_policy_holds_nothing() {
        let priority = Priority::default();
        let _guard = priority.raise();
        let hold = FirstStatusHold::new(false, priority);
        assert!(!hold.holds(hold.deadline()));
    }
}
