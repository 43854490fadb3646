//! The count of high-priority operations in progress: container starts and pod stops. Low-priority requests to the API
//! server, which cost processor time on the same node, wait while it is not zero.

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
}
