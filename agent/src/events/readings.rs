//! Readings of files that block: one at a time, on a thread of its own, with a pause before the next one.

use std::time::Duration;

use tokio::task::JoinError;
use tokio::task::JoinHandle;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tokio::time::sleep_until;

/// From the end of a reading to the beginning of the next one. Reading 10,000 cgroups takes 0.1 s: however often it is
/// requested, that is less than a tenth of the time of one processor.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// Readings, each for all requests `W` until it begins. One that is requested while another runs begins once, after it.
#[derive(Debug)]
pub(super) struct Readings<W, T> {
    wanted: Option<W>,
    running: Option<JoinHandle<T>>,
    /// No reading begins before.
    earliest: Instant,
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum Step<W, T> {
    /// To begin the reading that was requested.
    Begin(W),
    /// To take what was read. An error is a panic, or the end of the runtime.
    Ended(Result<T, JoinError>),
}

impl<W: Default, T: Send + 'static> Readings<W, T> {
    pub(super) fn new() -> Self {
        Self { wanted: None, running: None, earliest: Instant::now() }
    }

    /// Adds to the request for the next reading.
    pub(super) fn request(&mut self, add: impl FnOnce(&mut W)) {
        add(self.wanted.get_or_insert_with(W::default));
    }

    /// A reading was begun whose end was not returned yet.
    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Begins a reading, as [`Step::Begin`] has said.
    pub(super) fn begin(&mut self, read: impl FnOnce() -> T + Send + 'static) {
        self.running = Some(spawn_blocking(read));
    }

    /// Waits until there is something to do. Cancel-safe.
    pub(super) async fn next(&mut self) -> Step<W, T> {
        if let Some(running) = &mut self.running {
            let ended = running.await;
            (self.running, self.earliest) = (None, Instant::now() + PAUSE);
            return Step::Ended(ended);
        }
        if self.wanted.is_some() {
            sleep_until(self.earliest).await;
        }
        match self.wanted.take() {
            Some(wanted) => Step::Begin(wanted),
            None => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_during_a_reading_begin_one_more_after_a_pause() {
        let mut readings = Readings::<u32, &str>::new();
        assert!(readings.next().now_or_never().is_none(), "nothing is requested");
        readings.request(|requests| *requests += 1);
        assert!(matches!(readings.next().await, Step::Begin(1)));
        let (release, released) = std::sync::mpsc::channel::<()>();
        readings.begin(move || {
            // Returns when the other end is dropped.
            let _ = released.recv();
            "first"
        });
        for _ in 0..100 {
            readings.request(|requests| *requests += 1);
            assert!(readings.next().now_or_never().is_none() && readings.is_running(), "one at a time");
        }
        drop(release);
        assert!(matches!(readings.next().await, Step::Ended(Ok("first"))));
        let ended = Instant::now();
        assert!(readings.next().now_or_never().is_none(), "not without a pause");
        assert!(matches!(readings.next().await, Step::Begin(100)));
        assert!(ended.elapsed() >= PAUSE, "{:?}", ended.elapsed());
        readings.begin(|| "second");
        assert!(matches!(readings.next().await, Step::Ended(Ok("second"))));
        tokio::time::advance(2 * PAUSE).await;
        assert!(readings.next().now_or_never().is_none(), "no more is requested");
    }
}
