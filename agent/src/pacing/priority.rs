//! The count of high-priority operations in progress: container starts and pod stops. Low-priority requests to the API
//! server, which cost processor time on the same node, wait while it is not zero.

use std::time::Duration;

use tokio::sync::watch;

/// High-priority operations in progress. Clones share the count.
#[derive(Clone, Debug)]
pub struct Priority(watch::Sender<usize>);

impl Default for Priority {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Priority {
    /// Counts an operation until the guard is dropped.
    pub fn raise(&self) -> PriorityGuard {
        self.0.send_modify(|count| *count += 1);
        PriorityGuard(self.0.clone())
    }

    /// True if no high-priority operation is in progress.
    pub fn is_idle(&self) -> bool {
        *self.0.borrow() == 0
    }

    /// Waits until no high-priority operation is in progress. Dropping the future has no effect.
    pub async fn idle(&self) {
        // The sender is alive as long as `self`: there is no error.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Calls `action` each time no high-priority operation has been in progress for `pause`: once from the start, and once
    /// after each burst of operations. `action` must not block. Never completes; cancel-safe.
    pub async fn after_bursts(&self, pause: Duration, mut action: impl FnMut()) {
        let mut count = self.0.subscribe();
        loop {
            let is_idle = *count.borrow_and_update() == 0;
            let changed = match is_idle {
                true => tokio::time::timeout(pause, count.changed()).await,
                false => Ok(count.changed().await),
            };
            if changed.is_err() {
                action();
                // The sender is alive as long as `self`: there is no error.
                let _ = count.changed().await;
            }
        }
    }
}

/// A high-priority operation in progress.
#[derive(Debug)]
#[must_use]
pub struct PriorityGuard(watch::Sender<usize>);

impl Drop for PriorityGuard {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count = count.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn idle_means_that_every_guard_is_dropped() {
        let priority = Priority::default();
        let (first, second) = (priority.raise(), priority.clone().raise());
        drop(first);
        assert!(!priority.is_idle());
        drop(second);
        assert!(priority.is_idle());
        priority.idle().await;
    }

    #[tokio::test(start_paused = true)]
    async fn each_burst_is_followed_by_one_action_once_the_pause_is_over() {
        let priority = Priority::default();
        let start = tokio::time::Instant::now();
        let (actions, mut taken) = tokio::sync::mpsc::unbounded_channel();
        let acting = priority.clone();
        let pause = Duration::from_secs(30);
        tokio::spawn(async move {
            acting.after_bursts(pause, || actions.send(start.elapsed().as_secs()).unwrap()).await;
        });
        assert_eq!(taken.recv().await, Some(30));
        tokio::time::sleep(Duration::from_secs(1000)).await;
        assert!(taken.is_empty(), "nothing happens while nothing happens");
        let operation = priority.raise();
        tokio::time::sleep(Duration::from_secs(100)).await;
        drop(operation);
        tokio::time::sleep(Duration::from_secs(20)).await;
        drop(priority.raise());
        assert_eq!(taken.recv().await, Some(1180));
        assert!(taken.is_empty());
    }
}
