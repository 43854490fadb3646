//! Limits how many pods are stopped at the same time. Tearing a sandbox down (task, network) costs the runtime far more than
//! the signal; when many pods are deleted at once and all are stopped at once, the first is finished when the last is.
//!
//! A pod holds its permit from the signal until its sandbox is torn down, but not while its processes use their grace
//! period.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Priority;
use super::PriorityGuard;

/// Pods that are stopped at the same time, for each processor.
const PER_PROCESSOR: usize = 2;
/// Processes that exit later than this use their grace period.
const PROMPT_EXIT: Duration = Duration::from_millis(250);
/// Longest wait for a permit after a grace period, before the sandbox is torn down.
const MAX_TEARDOWN_WAIT: Duration = Duration::from_secs(5);
/// Longest wait for a permit: the grace period of a pod begins when its containers get their signal.
const MAX_WAIT: Duration = Duration::from_secs(2);

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

    /// Waits for a permit, no longer than [`MAX_WAIT`]. `immediately`: does not wait, now or later, for a pod whose termination
    /// has a deadline (eviction, node shutdown). Dropping the future gives up the place in the queue.
    pub async fn permit(&self, immediately: bool) -> StopPermit {
        let limiter = (!immediately).then(|| self.clone());
        let held = match &limiter {
            Some(limiter) => limiter.acquire(MAX_WAIT).await,
            None => None,
        };
        StopPermit { limiter, held, priority: Some(self.priority.raise()) }
    }

    async fn acquire(&self, max_wait: Duration) -> Option<OwnedSemaphorePermit> {
        let permits = self.permits.clone()?;
        // The semaphore is never closed.
        timeout(max_wait, permits.acquire_owned()).await.ok()?.ok()
    }

    /// Waits until all stops that wait now have had their permit, or [`MAX_WAIT`].
    pub(super) async fn pass(&self) {
        if let Some(permits) = &self.permits {
            // Without a permit the bound has passed; the permit itself is not needed.
            let _ = timeout(MAX_WAIT, permits.acquire()).await;
        }
    }
}

/// A place among the pods that are stopped at the same time; given back when dropped.
#[derive(Debug)]
pub struct StopPermit {
    /// `None` if the stop does not wait.
    limiter: Option<StopLimiter>,
    held: Option<OwnedSemaphorePermit>,
    /// Stops have high priority while they hold a permit.
    priority: Option<PriorityGuard>,
}

impl StopPermit {
    /// Waits for processes to exit. If they use their grace period, the permit is given back after [`PROMPT_EXIT`].
    pub async fn while_exiting<T>(&mut self, exit: impl Future<Output = T>) -> T {
        let mut exit = pin!(exit);
        if let Ok(exited) = timeout(PROMPT_EXIT, &mut exit).await {
            return exited;
        }
        (self.held, self.priority) = (None, None);
        exit.await
    }

    /// Before the sandbox is torn down: waits for a permit unless the stop still has one, no longer than
    /// [`MAX_TEARDOWN_WAIT`].
    pub async fn before_teardown(&mut self) {
        let Some(limiter) = &self.limiter else { return };
        if self.held.is_none() {
            self.held = limiter.acquire(MAX_TEARDOWN_WAIT).await;
        }
        self.priority.get_or_insert_with(|| limiter.priority.raise());
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
                let mut permit = limiter.permit(immediately).await;
                begins.lock().unwrap().push(start.elapsed().as_millis());
                permit.while_exiting(sleep(each_takes)).await;
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

    /// Forty pods at two per 250 ms would need five seconds: all beyond the first two go without a permit.
    #[tokio::test(start_paused = true)]
    async fn no_stop_waits_longer_than_two_seconds() {
        for each_takes in [ms(249), Duration::from_secs(30)] {
            let begins = begins(true, false, 40, each_takes).await;
            assert_eq!(begins.iter().max(), Some(&2000), "{begins:?}");
            assert!(begins.iter().filter(|begin| **begin == 2000).count() > 20, "{begins:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_with_a_deadline_and_a_disabled_limiter_do_not_wait() {
        assert_eq!(begins(true, true, 10, ms(100)).await, [0; 10]);
        assert_eq!(begins(false, false, 10, ms(100)).await, [0; 10]);
    }

    /// When each of eight pods is stopped, in milliseconds, if sandbox teardown takes half a second; two permits.
    async fn stopped(processes_take: Duration) -> Vec<u128> {
        let limiter = StopLimiter::new(true, 1, Priority::default());
        let start = Instant::now();
        let mut stops = JoinSet::new();
        for _ in 0..8 {
            let limiter = limiter.clone();
            stops.spawn(async move {
                let mut permit = limiter.permit(false).await;
                permit.while_exiting(sleep(processes_take)).await;
                permit.before_teardown().await;
                sleep(ms(500)).await;
                start.elapsed().as_millis()
            });
        }
        let mut stopped = stops.join_all().await;
        stopped.sort_unstable();
        stopped
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_keeps_its_permit_until_its_sandbox_is_torn_down() {
        assert_eq!(stopped(ms(100)).await, [600, 600, 1200, 1200, 1800, 1800, 2400, 2400]);
    }

    /// Signals go out at two per 250 ms; sandboxes of pods that used their grace period are torn down two at a time.
    #[tokio::test(start_paused = true)]
    async fn grace_periods_overlap_and_teardowns_are_limited() {
        let stopped = stopped(Duration::from_secs(10)).await;
        assert_eq!(stopped, [10_500, 10_500, 11_000, 11_000, 11_500, 11_500, 12_000, 12_000]);
    }

    /// The networks of two pods are never torn down.
    #[tokio::test(start_paused = true)]
    async fn a_teardown_waits_for_others_no_longer_than_five_seconds() {
        let limiter = StopLimiter::new(true, 1, Priority::default());
        let _hanging = (limiter.permit(false).await, limiter.permit(false).await);
        let start = Instant::now();
        let mut permit = limiter.permit(false).await;
        assert_eq!(start.elapsed().as_millis(), 2_000, "it has its signal without a permit");
        permit.while_exiting(sleep(ms(100))).await;
        permit.before_teardown().await;
        assert_eq!(start.elapsed().as_millis(), 7_100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_has_high_priority_while_it_holds_a_permit() {
        let limiter = StopLimiter::new(true, 1, Priority::default());
        let mut permit = limiter.permit(false).await;
        assert!(!limiter.priority.is_idle());
        permit.while_exiting(sleep(Duration::from_secs(30))).await;
        assert!(limiter.priority.is_idle());
        permit.before_teardown().await;
        assert!(!limiter.priority.is_idle());
        drop(permit);
        assert!(limiter.priority.is_idle());
    }
}
