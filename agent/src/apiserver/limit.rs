//! How many requests a client may send: so many per second, so many at once. Turns are given out in the order they are
//! asked for, which a limiter that is asked again and again would not do.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Requests per second if 0 is configured, as client libraries have it.
const DEFAULT_PER_SECOND: i32 = 5;
/// Requests at once if 0 is configured.
const DEFAULT_BURST: i32 = 10;

/// Gives turns to requests. One per client.
#[derive(Debug)]
pub struct Limiter {
    interval: Duration,
    burst: u32,
    /// When all turns given out so far are paid for.
    paid: Mutex<Option<Instant>>,
}

impl Limiter {
    /// `None` for a negative rate: no limit.
    pub fn new(per_second: i32, burst: i32) -> Option<Self> {
        let or = |value: i32, default: i32| if value == 0 { default } else { value };
        let per_second = u32::try_from(or(per_second, DEFAULT_PER_SECOND)).ok()?;
        let burst = u32::try_from(or(burst, DEFAULT_BURST)).unwrap_or(1);
        Some(Self { interval: Duration::from_secs(1) / per_second, burst, paid: Mutex::new(None) })
    }

    /// Waits for the next turn. A turn that is given up while waiting is lost.
    pub async fn acquire(&self) {
        let now = Instant::now();
        let at = {
            let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
            let (at, after) = slot_at(*paid, now, self.interval, self.burst);
            *paid = Some(after);
            at
        };
        if at > now {
            tokio::time::sleep_until(at).await;
        }
    }
}

/// When the next turn is, and when it is paid for. Every turn costs one interval; `burst` of them may be owed.
fn slot_at(paid: Option<Instant>, now: Instant, interval: Duration, burst: u32) -> (Instant, Instant) {
    let after = paid.map_or(now, |paid| paid.max(now)) + interval;
    let at = after.checked_sub(interval * burst).map_or(now, |at| at.max(now));
    (at, after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_goes_at_once_and_the_rest_at_the_rate() {
        let limiter = Limiter::new(50, 100).expect("a limit");
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
        assert!(rested.elapsed() < Duration::from_millis(5), "a second of rest buys fifty turns");
    }

    #[tokio::test(start_paused = true)]
    async fn turns_come_in_the_order_of_asking() {
        let limiter = std::sync::Arc::new(Limiter::new(10, 1).expect("a limit"));
        let (told, mut order) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..20 {
            let (limiter, told) = (limiter.clone(), told.clone());
            tokio::spawn(async move {
                limiter.acquire().await;
                told.send(number).expect("somebody listens");
            });
            tokio::task::yield_now().await;
        }
        for number in 0..20 {
            assert_eq!(order.recv().await, Some(number));
        }
    }

    #[test]
    fn zero_means_the_default_and_negative_no_limit() {
        let limiter = Limiter::new(0, 0).expect("a limit");
        assert_eq!((limiter.interval, limiter.burst), (Duration::from_millis(200), 10));
        assert!(Limiter::new(-1, 10).is_none());
    }
}
