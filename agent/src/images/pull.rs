//! Limits on pulling: how many at once (`serializeImagePulls`, `maxParallelImagePulls`), how many per second
//! (`registryPullQPS`, `registryBurst`).

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::runtime::RuntimeError;

/// Settings for pulling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullLimits {
    /// Pulls at once: 1 if serialized; `None` for any number.
    pub parallel: Option<usize>,
    /// Pulls per second in the long run; 0 for any number.
    pub per_second: u32,
    /// Pulls that may come in one burst.
    pub burst: u32,
}

impl Default for PullLimits {
    /// One after the other, 5 per second, 10 in a burst.
    fn default() -> Self {
        Self { parallel: Some(1), per_second: 5, burst: 10 }
    }
}

/// A pull that failed.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The rate limit is used up.
    #[error("pull QPS exceeded")]
    RateExceeded,
    /// The runtime refused.
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

#[derive(Debug)]
pub(super) struct Puller {
    turns: Option<Arc<Semaphore>>,
    bucket: Option<Mutex<Bucket>>,
}

/// Tokens that come back with time.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    burst: f64,
    per_second: f64,
    filled: Instant,
}

impl Puller {
    pub(super) fn new(limits: PullLimits) -> Self {
        let bucket = Bucket {
            tokens: f64::from(limits.burst),
            burst: f64::from(limits.burst),
            per_second: f64::from(limits.per_second),
            filled: Instant::now(),
        };
        Self {
            turns: limits.parallel.map(|parallel| Arc::new(Semaphore::new(parallel.max(1)))),
            bucket: (limits.per_second > 0).then(|| Mutex::new(bucket)),
        }
    }

    /// Waits for one of the places, first come, first served. Cancelled by dropping.
    pub(super) async fn turn(&self) -> Option<OwnedSemaphorePermit> {
        let turns = self.turns.as_ref()?;
        // The semaphore is never closed.
        Arc::clone(turns).acquire_owned().await.ok()
    }

    /// Takes a token, without waiting for one.
    pub(super) fn take_token(&self, now: Instant) -> Result<(), PullError> {
        let Some(bucket) = &self.bucket else { return Ok(()) };
        let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let gained = now.saturating_duration_since(bucket.filled).as_secs_f64() * bucket.per_second;
        bucket.tokens = (bucket.tokens + gained).min(bucket.burst);
        bucket.filled = now;
        if bucket.tokens < 1.0 {
            return Err(PullError::RateExceeded);
        }
        bucket.tokens -= 1.0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn tokens_come_back_with_time() {
        let puller = Puller::new(PullLimits { parallel: None, per_second: 2, burst: 3 });
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let taken: Vec<bool> = [0, 0, 0, 0, 400, 500, 900, 1000].map(|ms| puller.take_token(at(ms)).is_ok()).to_vec();
        assert_eq!(taken, [true, true, true, false, false, true, false, true]);
        let free = Puller::new(PullLimits { parallel: None, per_second: 0, burst: 1 });
        assert!((0..100).all(|_| free.take_token(start).is_ok()));
    }

    #[tokio::test(start_paused = true)]
    async fn turns_are_taken_one_by_one() {
        let puller = Puller::new(PullLimits::default());
        let first = puller.turn().await;
        let waiting = tokio::time::timeout(Duration::from_secs(1), puller.turn()).await;
        assert!(waiting.is_err());
        drop(first);
        assert!(puller.turn().await.is_some());
        assert!(Puller::new(PullLimits { parallel: None, ..PullLimits::default() }).turn().await.is_none());
    }
}
