//! systemd notifications: readiness, and the watchdog (sd_notify(3), sd_watchdog_enabled(3)).
//!
//! Owns the watchdog's settings and the interval of its notifications. Whether the agent is healthy is the caller's
//! check.

#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use sd_notify::NotifyState;
use thiserror::Error;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::config::duration::GoDuration;

/// Watchdog timeouts up to this are refused, as by upstream.
const MIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause before a failed notification is tried once more, and its jitter.
const RETRY: Duration = Duration::from_secs(1);
const JITTER: f64 = 0.1;

/// Invalid settings of the watchdog.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum WatchdogError {
    /// A variable is no number.
    #[error("configure watchdog: error converting {variable}: {value:?} is not a number")]
    NotANumber {
        /// Its name.
        variable: &'static str,
        /// Its value.
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
    /// The settings are invalid.
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
        if timeout <= MIN_TIMEOUT {
            return Err(WatchdogError::TooSmall(GoDuration::nanos(
                i64::try_from(timeout.as_nanos()).unwrap_or(i64::MAX),
            )));
        }
        Ok(Some(Self { interval: timeout / 2 }))
    }

    /// Notifies systemd while `check` succeeds, until `shutdown`. Without notifications systemd ends the process after
    /// the timeout.
    pub async fn run(self, check: impl Fn() -> Result<(), String>, shutdown: CancellationToken) {
        tracing::info!(interval = ?self.interval, "notifying systemd's watchdog");
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_problem = String::new();
        while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
            let problem = check().err().unwrap_or_default();
            if problem.is_empty() {
                notify_twice().await;
            } else if problem != last_problem {
                tracing::error!(problem, "unhealthy: not notifying systemd's watchdog");
            }
            last_problem = problem;
        }
    }
}

async fn notify_twice() {
    let Err(first) = notify(&[NotifyState::Watchdog]) else { return };
    tracing::debug!(error = %first, "cannot notify systemd's watchdog, trying again");
    tokio::time::sleep(RETRY.mul_f64(1.0 + JITTER * fastrand::f64())).await;
    if let Err(error) = notify(&[NotifyState::Watchdog]) {
        tracing::error!(%error, "cannot notify systemd's watchdog");
    }
}

/// Sends READY=1. Does nothing without systemd.
pub fn ready() {
    notify_or_log(NotifyState::Ready);
}

/// Sends STOPPING=1.
pub fn stopping() {
    notify_or_log(NotifyState::Stopping);
}

fn notify_or_log(state: NotifyState<'_>) {
    if let Err(error) = notify(&[state]) {
        tracing::warn!(%error, "cannot notify systemd");
    }
}

fn notify(state: &[NotifyState<'_>]) -> io::Result<()> {
    sd_notify::notify(state)
}
