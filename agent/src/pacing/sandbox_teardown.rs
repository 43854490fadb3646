//! Orders the teardown of sandboxes. Serialises the teardown for pods that terminated on their own, and delays it until no
//! pod has terminated for 250 ms: stopping a sandbox costs the runtime many times what it costs to report the end of a pod,
//! so terminations in quick succession are all reported first.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio::time::sleep_until;
use tokio::time::timeout;

/// Processors per concurrent teardown: half of them are left to starting and reporting.
const PROCESSORS_PER_TEARDOWN: usize = 2;
/// The node is idle when no pod has terminated for this long.
const IDLE_AFTER: Duration = Duration::from_millis(250);
/// Longest wait for an idle node and a permit.
const MAX_WAIT: Duration = Duration::from_millis(750);

/// A place among concurrent teardowns; given back when dropped.
pub type TeardownPermit = OwnedSemaphorePermit;

/// The queue of teardowns and the idle detector. Clones share them.
#[derive(Clone, Debug)]
pub struct SandboxTeardownQueue {
    enabled: bool,
    permits: Arc<Semaphore>,
    last_termination: Arc<Mutex<Option<Instant>>>,
}

impl SandboxTeardownQueue {
    pub(super) fn new(enabled: bool, processors: usize) -> Self {
        let permits = (processors / PROCESSORS_PER_TEARDOWN).max(1);
        Self { enabled, permits: Arc::new(Semaphore::new(permits)), last_termination: Arc::default() }
    }

    /// Notes that a pod has terminated on its own.
    pub fn pod_terminated(&self) {
        *self.last_termination.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Waits for a permit, no longer than [`MAX_WAIT`]: for a sandbox that the pod's status or API object waits for.
    /// Dropping the future gives up the place in the queue.
    pub async fn permit(&self) -> Option<TeardownPermit> {
        self.bounded(self.acquire()).await
    }

    /// Waits for an idle node and a permit, no longer than [`MAX_WAIT`]: for a sandbox that nothing waits for. Dropping the
    /// future gives up the place in the queue.
    pub async fn permit_when_idle(&self) -> Option<TeardownPermit> {
        let wait = async {
            loop {
                self.idle().await;
                let permit = self.acquire().await?;
                if self.idle_at().is_none_or(|at| at <= Instant::now()) {
                    return Some(permit);
                }
            }
        };
        self.bounded(wait).await
    }

    /// Waits until the node is idle, no longer than [`MAX_WAIT`]: before the content of a deleted pod is removed.
    pub async fn idle_node(&self) {
        let wait = async {
            self.idle().await;
            None
        };
        self.bounded(wait).await;
    }

    async fn bounded(&self, wait: impl Future<Output = Option<TeardownPermit>>) -> Option<TeardownPermit> {
        if !self.enabled {
            return None;
        }
        timeout(MAX_WAIT, wait).await.ok().flatten()
    }

    async fn acquire(&self) -> Option<TeardownPermit> {
        // The semaphore is never closed.
        self.permits.clone().acquire_owned().await.ok()
    }

    async fn idle(&self) {
        while let Some(at) = self.idle_at().filter(|at| *at > Instant::now()) {
            sleep_until(at).await;
        }
    }

    /// When the node becomes idle unless another pod terminates; `None` if none ever has.
    fn idle_at(&self) -> Option<Instant> {
        let last = *self.last_termination.lock().unwrap_or_else(PoisonError::into_inner);
        last.map(|at| at + IDLE_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::JoinSet;
    use tokio::time::sleep;

    use super::*;

    /// When the teardown of each of `pods` begins that terminate at an interval, in milliseconds since the first.
    async fn teardowns(enabled: bool, processors: usize, pods: u64, interval: u64, each_takes: u64) -> Vec<u128> {
        let (queue, start) = (SandboxTeardownQueue::new(enabled, processors), Instant::now());
        let mut all = JoinSet::new();
        for _ in 0..pods {
            let queue = queue.clone();
            queue.pod_terminated();
            all.spawn(async move {
                let _permit = queue.permit_when_idle().await;
                let at = start.elapsed().as_millis();
                sleep(Duration::from_millis(each_takes)).await;
                at
            });
            sleep(Duration::from_millis(interval)).await;
        }
        let mut all = all.join_all().await;
        all.sort_unstable();
        all
    }

    #[tokio::test(start_paused = true)]
    async fn pods_that_terminate_in_quick_succession_are_torn_down_after_the_last() {
        // The last one terminates after 400 ms.
        assert_eq!(teardowns(true, 1, 5, 100, 20).await, [650, 670, 690, 710, 730]);
        assert_eq!(teardowns(true, 2, 5, 100, 20).await, [650, 670, 690, 710, 730], "half of the processors");
        assert_eq!(teardowns(true, 4, 5, 100, 20).await, [650, 650, 670, 670, 690]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_single_pod_is_torn_down_after_a_quarter_of_a_second() {
        assert_eq!(teardowns(true, 2, 5, 1000, 50).await, [250, 1250, 2250, 3250, 4250]);
    }

    #[tokio::test(start_paused = true)]
    async fn no_teardown_waits_longer_than_the_bound() {
        let terminated = (0..50).map(|n| 100 * n);
        let waited: Vec<u128> =
            teardowns(true, 1, 50, 100, 2000).await.into_iter().zip(terminated).map(|(at, since)| at - since).collect();
        assert!(waited.iter().all(|waited| *waited <= 750), "{waited:?}");
        assert_eq!(waited[0], 750, "the node was not idle in that time");
    }

    #[tokio::test(start_paused = true)]
    async fn a_disabled_queue_does_not_wait() {
        assert_eq!(teardowns(false, 1, 5, 100, 50).await, [0, 100, 200, 300, 400]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_termination_while_waiting_for_a_permit_delays_further() {
        let queue = SandboxTeardownQueue::new(true, 1);
        queue.pod_terminated();
        let first = queue.permit().await;
        let second = tokio::spawn({
            let queue = queue.clone();
            async move { queue.permit_when_idle().await.map(|_permit| Instant::now()) }
        });
        sleep(Duration::from_millis(100)).await;
        queue.pod_terminated();
        let terminated = Instant::now();
        drop(first);
        assert_eq!(second.await.unwrap(), Some(terminated + IDLE_AFTER));
    }
}
