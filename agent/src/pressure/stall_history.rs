//! How long tasks have waited within a window, from readings of a counter at any times. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Of older readings those are kept that lie at least this part of the longest window apart: their number is bounded.
const SPACING: u32 = 100;

/// Readings of one counter of microseconds.
#[derive(Clone, Debug, Default)]
pub(super) struct StallHistory {
    readings: VecDeque<(Instant, u64)>,
}

impl StallHistory {
    /// Adds a reading, and drops those that no window of this length needs. After a total that is lower than the one
    /// before nothing is known of the past.
    pub(super) fn add(&mut self, now: Instant, total: u64, longest: Duration) {
        match self.readings.back() {
            Some((_, before)) if *before > total => self.readings.clear(),
            // Two readings of one moment: the second one adds nothing.
            Some((at, _)) if *at >= now => return,
            _ => {}
        }
        if let [.., before, last] = self.readings.make_contiguous()
            && last.0.saturating_duration_since(before.0) < longest / SPACING
        {
            self.readings.pop_back();
        }
        self.readings.push_back((now, total));
        // One reading from before the window stays, to know where it began.
        while self.readings.get(1).is_some_and(|(at, _)| now.saturating_duration_since(*at) >= longest) {
            self.readings.pop_front();
        }
    }

    /// The part of the last `window` in which tasks waited, between 0 and 1. `None` until readings cover the window. Between
    /// two readings waiting counts as evenly spread.
    pub(super) fn share(&self, window: Duration) -> Option<f64> {
        let (now, total) = *self.readings.back()?;
        let begin = now.checked_sub(window)?;
        let after = self.readings.iter().position(|(at, _)| *at > begin)?;
        let (left_at, left) = *self.readings.get(after.checked_sub(1)?)?;
        let (right_at, right) = self.readings[after];
        let passed = begin.saturating_duration_since(left_at).as_secs_f64();
        let length = right_at.saturating_duration_since(left_at).as_secs_f64();
        let at_begin = micros(left) + (micros(right) - micros(left)) * passed / length;
        Some(((micros(total) - at_begin) / (window.as_secs_f64() * 1e6)).clamp(0.0, 1.0))
    }
}

#[expect(clippy::cast_precision_loss, reason = "52 bits of microseconds are 140 years")]
fn micros(total: u64) -> f64 {
    total as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(readings: &[(u64, u64)]) -> StallHistory {
        let start = Instant::now() + Duration::from_secs(3600);
        let mut history = StallHistory::default();
        for (millis, total) in readings {
            history.add(start + Duration::from_millis(*millis), *total, Duration::from_secs(10));
        }
        history
    }

    fn percent(history: &StallHistory, millis: u64) -> Option<f64> {
        history.share(Duration::from_millis(millis)).map(|share| (share * 100.0).round())
    }

    #[tokio::test]
    async fn shares_of_windows() {
        let history = of(&[(0, 0), (1000, 500_000), (2000, 500_000), (2500, 900_000)]);
        assert_eq!(percent(&history, 500), Some(80.0));
        assert_eq!(percent(&history, 1000), Some(40.0), "from the middle between two readings");
        assert_eq!(percent(&history, 2500), Some(36.0));
        assert_eq!(percent(&history, 2600), None, "the window is not covered");
        assert_eq!(percent(&of(&[(0, 7)]), 500), None);
        assert_eq!(percent(&StallHistory::default(), 500), None);
    }

    #[tokio::test]
    async fn a_counter_that_goes_backwards_starts_anew() {
        let history = of(&[(0, 5_000_000), (1000, 5_500_000), (2000, 100)]);
        assert_eq!(percent(&history, 1000), None);
        let history = of(&[(0, 5_000_000), (1000, 100), (2000, 500_100)]);
        assert_eq!(percent(&history, 1000), Some(50.0));
    }

    #[tokio::test]
    async fn two_readings_of_one_moment_count_once() {
        let history = of(&[(0, 0), (500, 250_000), (500, 250_000), (1000, 500_000), (1000, 500_000)]);
        assert_eq!(percent(&history, 1000), Some(50.0));
    }

    #[tokio::test]
    async fn readings_are_bounded() {
        let dense: Vec<(u64, u64)> = (0..20_000).map(|n| (n, n * 500)).collect();
        let history = of(&dense);
        assert!(history.readings.len() <= 103, "{}", history.readings.len());
        assert_eq!((percent(&history, 500), percent(&history, 10_000)), (Some(50.0), Some(50.0)));
        let sparse: Vec<(u64, u64)> = (0..100).map(|n| (n * 9000, n * 900_000)).collect();
        let history = of(&sparse);
        assert_eq!((history.readings.len(), percent(&history, 10_000)), (3, Some(10.0)));
    }
}
