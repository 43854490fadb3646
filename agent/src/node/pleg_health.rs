//! Health of the PLEG for the node's readiness: relists must succeed. Pure: time is an argument.

use std::time::Duration;

use tokio::time::Instant;

/// For how long relists may fail (`relistThreshold` of the kubelet).
const THRESHOLD: Duration = Duration::from_secs(180);

/// State of relists.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlegHealth {
    listed: bool,
    failing_since: Option<Instant>,
}

impl PlegHealth {
    /// Updates with the result of the last relist; `None` if there was none yet.
    pub fn observe(&mut self, listed: Option<bool>, now: Instant) {
        match listed {
            None => {}
            Some(true) => *self = Self { listed: true, failing_since: None },
            Some(false) => {
                self.failing_since.get_or_insert(now);
            }
        }
    }

    /// The kubelet's messages of what is wrong.
    pub fn errors(&self, now: Instant) -> Vec<String> {
        if !self.listed {
            return vec!["PLEG is not healthy: pleg has yet to be successful".to_owned()];
        }
        let is_over = self.failing_since.is_some_and(|since| now >= since + THRESHOLD);
        // With the age at the threshold: a growing age would change the message with every status.
        is_over
            .then(|| "PLEG is not healthy: pleg was last seen active 3m0s ago; threshold is 3m0s".to_owned())
            .into_iter()
            .collect()
    }

    /// When failures will make the node NotReady.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        self.failing_since.map(|since| since + THRESHOLD).filter(|at| *at > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failing_relists_count_after_three_minutes() {
        let (mut health, start) = (PlegHealth::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        health.observe(None, start);
        assert_eq!(health.errors(start), ["PLEG is not healthy: pleg has yet to be successful"]);
        health.observe(Some(true), start);
        assert!(health.errors(at(1000)).is_empty(), "relists are rare while events arrive");
        health.observe(Some(false), at(10));
        health.observe(Some(false), at(20));
        assert_eq!((health.errors(at(189)).len(), health.due(at(189))), (0, Some(at(190))));
        assert_eq!(health.errors(at(190)).len(), 1);
        assert_eq!(health.due(at(190)), None);
        health.observe(Some(true), at(200));
        assert!(health.errors(at(500)).is_empty());
    }
}
