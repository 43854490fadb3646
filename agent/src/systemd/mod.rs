//! What systemd is told: that the agent is ready, and that it is still well.
//!
//! Owns the watchdog's settings and the rhythm of its notifications. Refuses to judge what is well: it asks.

#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use sd_notify::NotifyState;
use thiserror::Error;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::config::duration::GoDuration;

/// A watchdog that barks sooner cannot be satisfied reliably.
const LEAST: Duration = Duration::from_secs(1);
/// The pause before a notification that failed is tried once more, and how much longer it may be.
const RETRY: Duration = Duration::from_secs(1);
const JITTER: f64 = 0.1;

/// Settings of the watchdog that make no sense.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum WatchdogError {
    /// A variable is no number.
    #[error("configure watchdog: error converting {variable}: {value:?} is not a number")]
    NotANumber {
        /// Which.
        variable: &'static str,
        /// What it is.
        value: String,
    },
    /// Zero or less.
    #[error("configure watchdog: error WATCHDOG_USEC must be a positive number")]
    NotPositive,
    /// One second or less.
    #[error("configure watchdog timeout too small: {0}")]
    TooSmall(GoDuration),
}

/// The watchdog of this service: notified at half its timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watchdog {
    interval: Duration,
}

impl Watchdog {
    /// From the environment of process `pid`. `None` if there is no watchdog, or one for another process.
    ///
    /// # Errors
    /// If the settings make no sense.
    pub fn configured(
        variable: impl Fn(&'static str) -> Option<String>,
        pid: u32,
    ) -> Result<Option<Self>, WatchdogError> {
        let number = |name: &'static str| {
            let set = variable(name).filter(|value| !value.is_empty());
            let parsed = |value: String| match value.parse::<i64>() {
                Ok(number) => Ok(number),
                Err(_) => Err(WatchdogError::NotANumber { variable: name, value }),
            };
            set.map(parsed).transpose()
        };
        let Some(micros) = number("WATCHDOG_USEC")? else { return Ok(None) };
        let Some(micros) = u64::try_from(micros).ok().filter(|micros| *micros > 0) else {
            return Err(WatchdogError::NotPositive);
        };
        if number("WATCHDOG_PID")?.is_some_and(|watched| watched != i64::from(pid)) {
            return Ok(None);
        }
        let timeout = Duration::from_micros(micros);
        if timeout <= LEAST {
            return Err(WatchdogError::TooSmall(GoDuration::nanos(
                i64::try_from(timeout.as_nanos()).unwrap_or(i64::MAX),
            )));
        }
        Ok(Some(Self { interval: timeout / 2 }))
    }

    /// Notifies systemd for as long as `check` finds nothing wrong, until `shutdown`. While something is wrong it stays
    /// silent, and systemd ends the process after the timeout.
    pub async fn keep_quiet(self, check: impl Fn() -> Result<(), String>, shutdown: CancellationToken) {
        tracing::info!(interval = ?self.interval, "systemd's watchdog is kept quiet");
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            match check() {
                Ok(()) => notify_twice().await,
                Err(problem) => tracing::error!(problem, "not well: systemd's watchdog is not notified"),
            }
        }
    }
}

async fn notify_twice() {
    let Err(first) = notify(&[NotifyState::Watchdog]) else { return };
    tracing::debug!(error = %first, "systemd's watchdog was not notified, trying again");
    tokio::time::sleep(RETRY.mul_f64(1.0 + JITTER * fastrand::f64())).await;
    if let Err(error) = notify(&[NotifyState::Watchdog]) {
        tracing::error!(%error, "systemd's watchdog was not notified");
    }
}

/// Tells systemd that the service is up. Without systemd nothing happens.
pub fn ready() {
    tell(NotifyState::Ready);
}

/// Tells systemd that the service is about to end.
pub fn stopping() {
    tell(NotifyState::Stopping);
}

fn tell(state: NotifyState<'_>) {
    if let Err(error) = notify(&[state]) {
        tracing::warn!(%error, "systemd was not notified");
    }
}

fn notify(state: &[NotifyState<'_>]) -> io::Result<()> {
    sd_notify::notify(state)
}
