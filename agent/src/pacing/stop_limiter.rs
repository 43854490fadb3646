//! Limits how many pods are stopped at the same time. Removing the task of an exited container costs the runtime more than
//! stopping it; when many pods are deleted at once and all are stopped at once, the first is finished when the last is.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Priority;

/// Pods that are stopped at the same time, for each processor.
const PER_PROCESSOR: usize = 2;
/// A pod that takes longer to terminate waits for its own processes, and gives its permit back.
const PERMIT_TIME: Duration = Duration::from_millis(250);
/// Longest wait for a permit: the grace period of a pod begins when its containers get their signal.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Permits for stopping pods. Clones share them.
#[derive(Clone, Debug)]
pub struct StopLimiter {
    /// `None` if the policy is off.
    permits: Option<Arc<Semaphore>>,
    priority: Priority,
}

impl StopLimiter {
    pub(super) fn new(enabled: bool, processors: usize, priority: Priority) -> Self {
        let permits = enabled.then(|| Arc::new(Semaphore::new(PER_PROCESSOR * processors.max(1))));
        Self { permits, priority }
    }

    /// Runs `stop` once there is a permit, after [`MAX_WAIT`] without one. `immediately`: does not wait at all, for a pod
    /// whose termination has a deadline (eviction, node shutdown). The stop has high priority while it holds the permit.
    /// Dropping the future drops `stop`.
    pub async fn run<T>(&self, immediately: bool, stop: impl Future<Output = T>) -> T {
        let permit = match self.permits.as_ref().filter(|_| !immediately) {
            Some(permits) => timeout(MAX_WAIT, permits.acquire()).await.ok(),
            None => None,
        };
        let priority = self.priority.raise();
        let mut stop = pin!(stop);
        let prompt = timeout(PERMIT_TIME, &mut stop).await;
        drop((permit, priority));
        match prompt {
            Ok(done) => done,
            Err(_) => stop.await,
        }
    }

    /// Waits until all stops that wait now have had their permit, or [`MAX_WAIT`].
    pub(super) async fn pass(&self) {
        if let Some(permits) = &self.permits {
            // Without a permit the bound has passed; the permit itself is not needed.
            let _ = timeout(MAX_WAIT, permits.acquire()).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::task::JoinSet;
    use tokio::time::Instant;
    use tokio::time::sleep;

    use super::*;

    /// When each of `pods` stops begins, in milliseconds, on one processor: two permits.
    async fn begins(enabled: bool, immediately: bool, pods: usize, each_takes: Duration) -> Vec<u128> {
        let limiter = StopLimiter::new(enabled, 1, Priority::default());
        let begins = Arc::new(Mutex::new(Vec::new()));
        let start = Instant::now();
        let mut stops = JoinSet::new();
        for _ in 0..pods {
            let (limiter, begins) = (limiter.clone(), begins.clone());
            stops.spawn(async move {
                let stop = async {
                    begins.lock().unwrap().push(start.elapsed().as_millis());
                    sleep(each_takes).await;
                };
                limiter.run(immediately, stop).await;
            });
        }
        stops.join_all().await;
        Arc::try_unwrap(begins).unwrap().into_inner().unwrap()
    }

    const fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[tokio::test(start_paused = true)]
    async fn two_pods_per_processor_are_stopped_at_a_time() {
        assert_eq!(begins(true, false, 10, ms(100)).await, [0, 0, 100, 100, 200, 200, 300, 300, 400, 400]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_stop_gives_its_permit_back_after_a_quarter_of_a_second() {
        assert_eq!(begins(true, false, 8, Duration::from_secs(30)).await, [0, 0, 250, 250, 500, 500, 750, 750]);
    }

    /// Forty pods at two per 250 ms would need five seconds: all beyond the first second go without a permit.
    #[tokio::test(start_paused = true)]
    async fn no_stop_waits_longer_than_a_second() {
        for each_takes in [ms(249), Duration::from_secs(30)] {
            let begins = begins(true, false, 40, each_takes).await;
            assert_eq!(begins.iter().max(), Some(&1000), "{begins:?}");
            assert!(begins.iter().filter(|begin| **begin == 1000).count() > 20, "{begins:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_with_a_deadline_and_a_disabled_limiter_do_not_wait() {
        assert_eq!(begins(true, true, 10, ms(100)).await, [0; 10]);
        assert_eq!(begins(false, false, 10, ms(100)).await, [0; 10]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_has_high_priority_for_a_quarter_of_a_second() {
        let limiter = StopLimiter::new(true, 1, Priority::default());
        let stop = limiter.run(false, sleep(Duration::from_secs(30)));
        let mut stop = pin!(stop);
        assert!(timeout(ms(249), &mut stop).await.is_err() && !limiter.priority.is_idle());
        assert!(timeout(ms(2), &mut stop).await.is_err() && limiter.priority.is_idle());
    }
}
