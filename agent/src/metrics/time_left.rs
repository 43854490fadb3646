//! Gauges of the time that is left until a moment. Computed for each scrape: a value that was set once would stay as it is
//! while nothing happens, which is when it matters.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::SystemTime;

use prometheus::Gauge;
use prometheus::core::Collector;
use prometheus::core::Desc;
use prometheus::proto::MetricFamily;

use crate::model::Clock;

/// Seconds until a moment; negative after it, infinitely many while there is none.
#[derive(Clone, Debug)]
pub(super) struct TimeLeft {
    gauge: Gauge,
    end: Arc<Mutex<Option<(SystemTime, Clock)>>>,
}

impl TimeLeft {
    pub(super) fn new(name: &str, help: &str) -> prometheus::Result<Self> {
        Ok(Self { gauge: Gauge::new(name, help)?, end: Arc::default() })
    }

    /// Sets the moment, as this clock shows it.
    pub(super) fn set(&self, end: Option<SystemTime>, clock: Clock) {
        // The value is replaced whole.
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = end.map(|end| (end, clock));
    }

    /// Whole seconds, as upstream shows of certificates.
    fn seconds(&self) -> f64 {
        let end = *self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((end, clock)) = end else { return f64::INFINITY };
        match end.duration_since(clock.wall()) {
            Ok(left) => left.as_secs_f64().trunc(),
            Err(over) => -over.duration().as_secs_f64().trunc(),
        }
    }
}

impl Collector for TimeLeft {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.gauge.set(self.seconds());
        self.gauge.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_left_becomes_less_and_then_negative() {
        let origin = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let (clock, left) = (Clock::derived(origin), TimeLeft::new("left_seconds", "Left.").expect("a gauge"));
        assert_eq!(left.seconds(), f64::INFINITY);
        left.set(Some(origin + Duration::from_millis(90_500)), clock);
        for (passes, expected) in [(0, 90.0), (60, 30.0), (40, -9.0)] {
            tokio::time::advance(Duration::from_secs(passes)).await;
            assert_eq!(left.seconds(), expected, "{passes} s later");
        }
        left.set(None, clock);
        assert_eq!(left.seconds(), f64::INFINITY);
    }
}
