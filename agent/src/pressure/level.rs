//! A level of pressure with hysteresis: entered when the kernel's trigger fires, left when tasks have waited less than a
//! lower threshold for some time. Pure; the time is an argument.

use std::time::Duration;

use tokio::time::Instant;

use crate::config::pressure::Trigger;

/// The level of one trigger.
#[derive(Clone, Copy, Debug, Default)]
pub struct Level {
    state: Option<Entered>,
}

#[derive(Clone, Copy, Debug)]
struct Entered {
    since: Instant,
    /// The last reading: when, and the microseconds that tasks had waited since the machine started.
    last: (Instant, u64),
    /// Since when less was waited than the lower threshold.
    calm_since: Option<Instant>,
}

/// A change of a level.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Crossing {
    /// Tasks wait for too long.
    Entered,
    /// They do no longer; for how long they did.
    Left(Duration),
}

impl Level {
    /// The level is entered.
    pub fn is_entered(&self) -> bool {
        self.state.is_some()
    }

    /// The trigger has fired; `total`: microseconds of waiting since the machine started.
    pub fn fired(&mut self, now: Instant, total: u64) -> Option<Crossing> {
        match &mut self.state {
            Some(entered) => {
                entered.calm_since = None;
                None
            }
            None => {
                self.state = Some(Entered { since: now, last: (now, total), calm_since: None });
                Some(Crossing::Entered)
            }
        }
    }

    /// Takes a reading while the level is entered. A total that is lower than the one before (the cgroup was created anew)
    /// counts as no waiting.
    pub fn sampled(&mut self, trigger: &Trigger, now: Instant, total: u64) -> Option<Crossing> {
        let entered = self.state.as_mut()?;
        let (at, before) = entered.last;
        let passed = now.saturating_duration_since(at);
        if passed.is_zero() {
            return None;
        }
        entered.last = (now, total);
        let waited = Duration::from_micros(total.saturating_sub(before));
        // waited / passed < leave_stall / window, without a division.
        let is_calm =
            waited.as_micros() * trigger.window.as_micros() < trigger.leave_stall.as_micros() * passed.as_micros();
        if !is_calm {
            entered.calm_since = None;
            return None;
        }
        let calm_since = *entered.calm_since.get_or_insert(at);
        if now.saturating_duration_since(calm_since) < trigger.leave_after {
            return None;
        }
        let lasted = now.saturating_duration_since(entered.since);
        self.state = None;
        Some(Crossing::Left(lasted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::pressure::PressureResource;
    use crate::config::pressure::PressureScope;
    use crate::config::pressure::StallKind;

    const TRIGGER: Trigger = Trigger {
        resource: PressureResource::Memory,
        kind: StallKind::Some,
        scope: PressureScope::Node,
        stall: Duration::from_millis(200),
        window: Duration::from_secs(1),
        leave_stall: Duration::from_millis(100),
        leave_after: Duration::from_secs(3),
    };

    /// Microseconds waited in each second after the trigger fired; the seconds after which the level is left.
    fn left_after(waited: &[u64]) -> Option<usize> {
        let (mut level, start, mut total) = (Level::default(), Instant::now(), 1_000_000);
        assert_eq!(level.fired(start, total), Some(Crossing::Entered));
        let left = waited.iter().zip(1_u64..).position(|(waited, second)| {
            total += waited;
            let crossing = level.sampled(&TRIGGER, start + Duration::from_secs(second), total);
            assert_eq!(level.is_entered(), crossing.is_none());
            crossing.is_some_and(|crossing| crossing == Crossing::Left(Duration::from_secs(second)))
        });
        left.map(|position| position + 1)
    }

    #[tokio::test]
    async fn a_level_is_left_at_a_lower_threshold_after_a_time() {
        assert_eq!(left_after(&[0, 0, 0]), Some(3));
        assert_eq!(left_after(&[300_000, 150_000, 150_000, 150_000, 150_000]), None, "between the two thresholds");
        assert_eq!(left_after(&[99_000, 99_000, 150_000, 0, 0, 0]), Some(6), "calm without interruption");
    }

    #[tokio::test]
    async fn a_trigger_that_fires_again_keeps_the_level() {
        let (mut level, start) = (Level::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        level.fired(start, 0);
        assert_eq!(level.sampled(&TRIGGER, at(2), 0), None);
        assert_eq!(level.fired(at(2), 0), None, "it is entered already");
        assert_eq!(level.sampled(&TRIGGER, at(4), 0), None, "the time begins anew");
        assert_eq!(level.sampled(&TRIGGER, at(5), 0), Some(Crossing::Left(Duration::from_secs(5))));
        assert_eq!(level.sampled(&TRIGGER, at(6), 0), None, "nothing to leave");
    }

    #[tokio::test]
    async fn counters_that_go_backwards_are_no_waiting() {
        let (mut level, start) = (Level::default(), Instant::now());
        level.fired(start, 9_000_000);
        assert_eq!(level.sampled(&TRIGGER, start, 5), None, "no time has passed");
        assert_eq!(level.sampled(&TRIGGER, start + Duration::from_secs(1), 5), None);
        let left = level.sampled(&TRIGGER, start + Duration::from_secs(4), 6);
        assert_eq!(left, Some(Crossing::Left(Duration::from_secs(4))));
    }
}
