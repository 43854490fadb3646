//! Retries of `ImageFsInfo`, by which the eviction manager finds the disks of images and of writable layers: growing pauses,
//! and one log line for each change of the reason.

use std::time::Duration;

use tokio::time::Instant;

use crate::model::Backoff;
use crate::model::LoggedReasons;

/// The first pause is shorter than that between two passes of the eviction manager.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// Without the call, file systems of the runtime have no signals: soon after a recovery they must have them again.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// What fails.
const CALL: &str = "ImageFsInfo";

/// When the call is made again after failures.
#[derive(Debug)]
pub(super) struct ImageFsRetry {
    pauses: Backoff,
    due: Option<Instant>,
    logged: LoggedReasons,
}

impl Default for ImageFsRetry {
    fn default() -> Self {
        Self { pauses: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE), due: None, logged: LoggedReasons::default() }
    }
}

impl ImageFsRetry {
    /// The pause after a failure has not ended.
    pub(super) fn is_early(&self) -> bool {
        self.due.is_some_and(|due| due > Instant::now())
    }

    /// The call failed, or its answer is of no use.
    pub(super) fn failed(&mut self, reason: &str) {
        let pause = self.pauses.failed(fastrand::f64() * 0.5);
        self.due = Some(Instant::now() + pause);
        if self.logged.is_new(CALL, reason) {
            tracing::warn!(reason, retry_in = ?pause, "cannot get the image file system from the runtime");
        } else {
            tracing::debug!(reason, retry_in = ?pause, "cannot get the image file system from the runtime again");
        }
    }

    /// The disks are known.
    pub(super) fn succeeded(&mut self) {
        self.pauses.succeeded();
        self.logged.succeeded(CALL);
        self.due = None;
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;
    use crate::model::testing::LogCount;

    #[tokio::test(start_paused = true)]
    async fn a_call_that_is_refused_for_ever_is_repeated_with_growing_pauses_and_logged_once() {
        let warned = LogCount::start("keblet::eviction::image_fs_retry", Level::WARN);
        let (mut retry, mut calls) = (ImageFsRetry::default(), Vec::new());
        // A pass every second, as while memory is short.
        for second in 0..1200_u64 {
            if !retry.is_early() {
                calls.push(second);
                retry.failed("refused for ever");
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        let last = calls.iter().filter(|second| **second >= 600).count();
        assert!((12..=21).contains(&last) && calls.len() <= 43, "{calls:?}");
        assert!(calls[1] <= 8 && calls[2] - calls[1] >= 10, "{calls:?}");
        assert!(calls.windows(2).all(|two| two[1] - two[0] <= 46), "signals are late by less than a minute: {calls:?}");
        assert_eq!(warned.lines(), 1);
        retry.failed("another reason");
        assert_eq!(warned.lines(), 2);
        retry.succeeded();
        assert!(!retry.is_early());
    }
}
