//! Limits how many pods' containers, sandboxes and logs are removed at the same time. Nothing waits for a removal, and pods
//! that are being stopped go first.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;

use super::StopLimiter;

/// Pods whose content is removed at the same time.
const REMOVALS: usize = 2;
/// A removal that takes longer most likely waits for a call that hangs, such as the teardown of a pod's network, and uses no
/// processor.
const LIMIT: Duration = Duration::from_secs(10);

/// Permits for removals. Clones share them.
#[derive(Clone, Debug)]
pub struct RemovalPermits {
    permits: Arc<Semaphore>,
    stops: StopLimiter,
}

impl RemovalPermits {
    pub(super) fn new(stops: StopLimiter) -> Self {
        Self { permits: Arc::new(Semaphore::new(REMOVALS)), stops }
    }

    /// Runs `removal` with a permit, which it keeps for 10 s at most. If the future is dropped, `removal` is dropped too,
    /// however far it has come.
    pub async fn run<T>(&self, removal: impl Future<Output = T>) -> T {
        let permit = self.acquire().await;
        let mut removal = std::pin::pin!(removal);
        if let Ok(removed) = tokio::time::timeout(LIMIT, removal.as_mut()).await {
            return removed;
        }
        drop(permit);
        removal.await
    }

    /// Waits for a permit, and behind the pods that wait to be stopped. Dropping the future gives up the place in the
    /// queue.
    async fn acquire(&self) -> Option<OwnedSemaphorePermit> {
        // The semaphore is never closed.
        let permit = self.permits.clone().acquire_owned().await.ok();
        self.stops.pass().await;
        permit
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;
    use tokio::time::sleep;

    use crate::pacing::Pacing;
    use crate::pacing::PacingPolicy;

    #[tokio::test(start_paused = true)]
    async fn two_at_a_time_and_behind_pods_that_are_stopped() {
        let pacing = Pacing::new(PacingPolicy::default(), 1);
        let start = Instant::now();
        for _ in 0..2 {
            let pacing = pacing.clone();
            tokio::spawn(async move {
                let _permit = pacing.stops.permit(false).await;
                sleep(Duration::from_millis(100)).await;
            });
        }
        tokio::task::yield_now().await;
        let first = pacing.removals.acquire().await;
        assert_eq!(start.elapsed(), Duration::from_millis(100), "the stops have the permits first");
        let second = pacing.removals.acquire().await;
        let third = tokio::time::timeout(Duration::from_secs(5), pacing.removals.acquire()).await;
        assert!(third.is_err(), "two removals are in progress");
        drop((first, second));
        assert!(pacing.removals.acquire().await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn stops_that_hang_delay_a_removal_by_two_seconds() {
        let pacing = Pacing::new(PacingPolicy::default(), 1);
        let _hanging = (pacing.stops.permit(false).await, pacing.stops.permit(false).await);
        let start = Instant::now();
        assert_eq!(pacing.removals.run(async { 1 }).await, 1);
        assert_eq!(start.elapsed(), Duration::from_secs(2));
    }

    #[tokio::test(start_paused = true)]
    async fn removals_that_hang_keep_no_others_waiting() {
        let pacing = Pacing::new(PacingPolicy::default(), 1);
        let start = Instant::now();
        for _ in 0..2 {
            let pacing = pacing.clone();
            tokio::spawn(async move { pacing.removals.run(std::future::pending::<()>()).await });
        }
        tokio::task::yield_now().await;
        assert_eq!(pacing.removals.run(async { 1 }).await, 1);
        assert_eq!(start.elapsed(), Duration::from_secs(10));
        let slow = pacing.removals.run(async {
            sleep(Duration::from_secs(30)).await;
            2
        });
        assert_eq!(slow.await, 2, "it continues without a permit");
    }
}
