//! A rate limiter: so many operations per second in the long run, so many at once.
//!
//! Permits are granted in the order of requests. A permit costs one interval (the reciprocal of the rate); up to `burst`
//! intervals may be borrowed from the future (generic cell rate algorithm).

use std::num::NonZeroU32;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::Instant;

/// Grants permits at a bounded rate. Shared by reference; needs no task of its own.
#[derive(Debug)]
pub struct RateLimiter {
    interval: Duration,
    burst: u32,
    /// The end of the intervals of all permits granted so far, one interval each.
    reserved_until: Mutex<Option<Instant>>,
}

impl RateLimiter {
    /// `per_second` permits per second in the long run, `burst` at once.
    pub fn new(per_second: NonZeroU32, burst: NonZeroU32) -> Self {
        let interval = Duration::from_secs(1) / per_second.get();
        Self { interval, burst: burst.get(), reserved_until: Mutex::default() }
    }

    /// Waits for a permit. When the wait is cancelled, the permit is returned.
    pub async fn acquire(&self) {
        let now = Instant::now();
        let at = {
            let mut reserved_until = self.lock();
            let (at, after) = self.reserve(*reserved_until, now);
            *reserved_until = Some(after);
            at
        };
        if at > now {
            let reservation = Reservation { limiter: self };
            tokio::time::sleep_until(at).await;
            std::mem::forget(reservation);
        }
    }

    /// Takes a permit if one is free at `now`; false, and none is taken, if none is.
    pub fn try_acquire(&self, now: Instant) -> bool {
        let mut reserved_until = self.lock();
        let (at, after) = self.reserve(*reserved_until, now);
        let is_free = at <= now;
        if is_free {
            *reserved_until = Some(after);
        }
        is_free
    }

    /// When the next permit is granted, and the end of all intervals with that of this permit.
    fn reserve(&self, reserved_until: Option<Instant>, now: Instant) -> (Instant, Instant) {
        let after = reserved_until.map_or(now, |until| until.max(now)) + self.interval;
        let at = after.checked_sub(self.interval * self.burst).map_or(now, |at| at.max(now));
        (at, after)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        // Each change is one assignment: a panic elsewhere leaves the value usable.
        self.reserved_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A permit that is waited for. Dropping it returns the permit.
struct Reservation<'a> {
    limiter: &'a RateLimiter,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if let Some(reserved_until) = &mut *self.limiter.lock() {
            *reserved_until = reserved_until.checked_sub(self.limiter.interval).unwrap_or(*reserved_until);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn limiter(per_second: u32, burst: u32) -> RateLimiter {
        let nonzero = |number| NonZeroU32::new(number).expect("not zero");
        RateLimiter::new(nonzero(per_second), nonzero(burst))
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_granted_at_once_and_the_rest_at_the_rate() {
        let limiter = limiter(50, 100);
        let began = Instant::now();
        for _ in 0..100 {
            limiter.acquire().await;
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        for _ in 0..900 {
            limiter.acquire().await;
        }
        assert!(began.elapsed().abs_diff(Duration::from_secs(18)) < Duration::from_millis(5), "{:?}", began.elapsed());
        tokio::time::advance(Duration::from_secs(1)).await;
        let rested = Instant::now();
        for _ in 0..50 {
            limiter.acquire().await;
        }
        assert!(rested.elapsed() < Duration::from_millis(5), "an idle second refills fifty permits");
    }

    #[tokio::test(start_paused = true)]
    async fn permits_are_granted_in_the_order_of_requests() {
        let limiter = Arc::new(limiter(10, 1));
        let (granted, mut order) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..20 {
            let (limiter, granted) = (limiter.clone(), granted.clone());
            tokio::spawn(async move {
                limiter.acquire().await;
                granted.send(number).expect("the receiver lives");
            });
            tokio::task::yield_now().await;
        }
        for number in 0..20 {
            assert_eq!(order.recv().await, Some(number));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn cancelled_waits_are_refunded() {
        let limiter = limiter(1, 1);
        limiter.acquire().await;
        for _ in 0..100 {
            let cancelled = tokio::time::timeout(Duration::from_millis(1), limiter.acquire()).await;
            assert!(cancelled.is_err(), "the burst is spent");
        }
        let began = Instant::now();
        limiter.acquire().await;
        assert!(began.elapsed() <= Duration::from_secs(1), "cancelled waits delay others: {:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_permit_without_waiting() {
        let limiter = limiter(2, 3);
        let now = Instant::now();
        let granted = (0..10).filter(|_| limiter.try_acquire(now)).count();
        assert_eq!(granted, 3, "the burst");
        assert!(!limiter.try_acquire(now + Duration::from_millis(499)));
        assert!(limiter.try_acquire(now + Duration::from_millis(500)));
        assert!(!limiter.try_acquire(now + Duration::from_millis(500)), "refusals cost nothing, grants do");
    }
}
