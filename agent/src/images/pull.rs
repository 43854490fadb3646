//! Limits on image pulls: how many in parallel (`serializeImagePulls`, `maxParallelImagePulls`), how many per second
//! (`registryPullQPS`, `registryBurst`).

use std::num::NonZeroU32;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tonic::Code;

use crate::model::RateLimiter;
use crate::model::aggregate;
use crate::runtime::RuntimeError;

/// Limits on image pulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullLimits {
    /// Parallel pulls: 1 if serialized; `None` for no limit.
    pub parallel: Option<usize>,
    /// Pulls per second on average; 0 for no limit.
    pub per_second: u32,
    /// Size of a burst.
    pub burst: u32,
}

impl Default for PullLimits {
    /// Serialized, 5 per second, bursts of 10.
    fn default() -> Self {
        Self { parallel: Some(1), per_second: 5, burst: 10 }
    }
}

/// A pull that failed.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The rate limit is exceeded.
    #[error("pull QPS exceeded")]
    RateExceeded,
    /// The runtime failed the calls, one with each credential.
    #[error("{}", joined(.0))]
    Runtime(Vec<RuntimeError>),
    /// The pod was terminated meanwhile. The text is that of a kubelet, whose call to the runtime ends.
    #[error("rpc error: code = Canceled desc = context canceled")]
    Cancelled {
        /// When the runtime was asked, if it was: it may have completed the pull.
        asked: Option<Instant>,
    },
}

/// The errors as upstream joins them: each text once, in brackets if there are several. A runtime's own message without
/// a known code is shown alone.
fn joined(errors: &[RuntimeError]) -> String {
    let text = |error: &RuntimeError| match error.code() {
        Code::Unknown => error.message(),
        _ => error.rpc_text(),
    };
    aggregate(errors.iter().map(text))
}

/// The limits of one image service.
#[derive(Debug)]
pub(super) struct PullLimiter {
    parallel: Option<Arc<Semaphore>>,
    rate: Option<RateLimiter>,
}

impl PullLimiter {
    pub(super) fn new(limits: PullLimits) -> Self {
        let rate = NonZeroU32::new(limits.per_second).zip(NonZeroU32::new(limits.burst.max(1)));
        Self {
            parallel: limits.parallel.map(|parallel| Arc::new(Semaphore::new(parallel.max(1)))),
            rate: rate.map(|(per_second, burst)| RateLimiter::new(per_second, burst)),
        }
    }

    /// Waits for a permit to pull, first come, first served; `None` without a limit. Cancelled by dropping.
    pub(super) async fn acquire_permit(&self) -> Option<OwnedSemaphorePermit> {
        let parallel = self.parallel.as_ref()?;
        // The semaphore is never closed.
        Arc::clone(parallel).acquire_owned().await.ok()
    }

    /// Takes a token of `registryPullQPS` without waiting.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn take_token(&self, now: Instant) -> Result<(), PullError> {
        let granted = self.rate.as_ref().is_none_or(|rate| rate.try_acquire(now));
        granted.then_some(()).ok_or(PullError::RateExceeded)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_rate_limit_refuses_without_waiting() {
        let limiter = PullLimiter::new(PullLimits { parallel: None, per_second: 2, burst: 3 });
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let taken: Vec<bool> = [0, 0, 0, 0, 400, 500, 900, 1000].map(|ms| limiter.take_token(at(ms)).is_ok()).to_vec();
        assert_eq!(taken, [true, true, true, false, false, true, false, true]);
        let free = PullLimiter::new(PullLimits { parallel: None, per_second: 0, burst: 1 });
        assert!((0..100).all(|_| free.take_token(start).is_ok()));
    }

    #[tokio::test(start_paused = true)]
    async fn serialized_pulls_wait_for_each_other() {
        let limiter = PullLimiter::new(PullLimits::default());
        let first = limiter.acquire_permit().await;
        let waiting = tokio::time::timeout(Duration::from_secs(1), limiter.acquire_permit()).await;
        assert!(waiting.is_err());
        drop(first);
        assert!(limiter.acquire_permit().await.is_some());
        let limiter = PullLimiter::new(PullLimits { parallel: Some(2), ..PullLimits::default() });
        let permits = || tokio::time::timeout(Duration::from_secs(1), limiter.acquire_permit());
        let held = (permits().await, permits().await, permits().await);
        assert!(matches!(held, (Ok(Some(_)), Ok(Some(_)), Err(_))), "as many at a time as configured: {held:?}");
        assert!(
            PullLimiter::new(PullLimits { parallel: None, ..PullLimits::default() }).acquire_permit().await.is_none()
        );
    }
}
