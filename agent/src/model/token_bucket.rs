//! Rate limit as a token bucket. Pure: callers pass the time, and wait or fail as they like.

use std::num::NonZeroU32;
use std::time::Duration;

use tokio::time::Instant;

/// A bucket of `burst` tokens that refills at a constant rate. Tokens may be reserved ahead of time, so that waiting callers
/// are served in the order in which they asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    interval: Duration,
    burst: u32,
    /// When the bucket will be full again; `None` while it has never been used.
    full_at: Option<Instant>,
}

impl TokenBucket {
    /// A full bucket of `burst` tokens that gains `per_second` tokens a second.
    pub fn new(per_second: NonZeroU32, burst: u32) -> Self {
        Self { interval: Duration::from_secs(1) / per_second.get(), burst, full_at: None }
    }

    /// Takes a token if one is available at `now`.
    pub fn try_take(&mut self, now: Instant) -> bool {
        let (available_at, full_at) = self.next(now);
        let available = available_at <= now;
        if available {
            self.full_at = Some(full_at);
        }
        available
    }

    /// Takes the next token, which may not be available yet, and returns the time from which it may be used.
    pub fn reserve(&mut self, now: Instant) -> Instant {
        let (available_at, full_at) = self.next(now);
        self.full_at = Some(full_at);
        available_at
    }

    /// Returns a reserved token that was not used.
    pub fn refund(&mut self) {
        self.full_at = self.full_at.and_then(|full_at| full_at.checked_sub(self.interval));
    }

    /// When the next token is available, and when the bucket is full again after it was taken.
    fn next(&self, now: Instant) -> (Instant, Instant) {
        let full_at = self.full_at.map_or(now, |full_at| full_at.max(now)) + self.interval;
        let available_at = full_at.checked_sub(self.interval * self.burst).map_or(now, |at| at.max(now));
        (available_at, full_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(per_second: u32, burst: u32) -> TokenBucket {
        TokenBucket::new(NonZeroU32::new(per_second).expect("not zero"), burst)
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_refill_at_the_rate() {
        let mut bucket = bucket(2, 3);
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let taken: Vec<bool> = [0, 0, 0, 0, 400, 500, 900, 1000].map(|millis| bucket.try_take(at(millis))).to_vec();
        assert_eq!(taken, [true, true, true, false, false, true, false, true]);
    }

    #[tokio::test(start_paused = true)]
    async fn reservations_are_spaced_by_the_rate_and_can_be_refunded() {
        let mut bucket = bucket(10, 2);
        let start = Instant::now();
        let waits = |bucket: &mut TokenBucket| bucket.reserve(start).duration_since(start).as_millis();
        assert_eq!([(); 4].map(|()| waits(&mut bucket)), [0, 0, 100, 200]);
        bucket.refund();
        assert_eq!(waits(&mut bucket), 200, "the refunded token is given out again");
        assert!(!bucket.try_take(start));
    }
}
