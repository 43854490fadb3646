//! Defers the delivery of events while containers are being started or pods stopped: delivering costs the API server, and
//! on a small cluster the same node, more than it costs the agent. Warnings are not deferred: the event of an OOM kill has
//! to be sent within 200 ms.

use std::time::Duration;

use tokio::time::timeout;

use super::Priority;

/// An event this old is delivered in any case.
const MAX_AGE: Duration = Duration::from_secs(2);

/// Whether events are deferred.
#[derive(Clone, Debug)]
pub struct EventDeferral {
    enabled: bool,
    priority: Priority,
}

impl EventDeferral {
    pub(super) fn new(enabled: bool, priority: Priority) -> Self {
        Self { enabled, priority }
    }

    /// Waits until an event of this age may be delivered. Dropping the future has no effect.
    pub async fn ready(&self, age: Duration) {
        if self.enabled {
            // Past the bound it is delivered all the same.
            let _ = timeout(MAX_AGE.saturating_sub(age), self.priority.idle()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_event_is_deferred_until_idle_or_two_seconds_old() {
        let priority = Priority::default();
        let events = EventDeferral::new(true, priority.clone());
        let start = Instant::now();
        events.ready(Duration::ZERO).await;
        assert_eq!(start.elapsed(), Duration::ZERO, "nothing is in progress");
        let guard = priority.raise();
        events.ready(Duration::from_millis(1500)).await;
        assert_eq!(start.elapsed(), Duration::from_millis(500));
        drop(guard);
        events.ready(Duration::ZERO).await;
        assert_eq!(start.elapsed(), Duration::from_millis(500));
    }

    #[tokio::test(start_paused = true)]
    async fn a_disabled_policy_defers_nothing() {
        let priority = Priority::default();
        let _guard = priority.raise();
        let start = Instant::now();
        EventDeferral::new(false, priority).ready(Duration::ZERO).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
    }
}
