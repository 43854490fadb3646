//! How long all tasks of the node waited for memory: samples of the kernel's counter, and what follows from them.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use anyhow::Context as _;
use tokio_util::task::AbortOnDropHandle;

use crate::stamps::monotonic_now;
use crate::stamps::seconds;

const PATH: &str = "/proc/pressure/memory";
/// Bounds the error of all times that follow.
const PERIOD: Duration = Duration::from_millis(100);
/// The windows of the policy, in seconds, and its threshold.
const WINDOWS: [f64; 2] = [1.0, 5.0];
const THRESHOLD: f64 = 0.2;
/// The node is relieved when tasks have waited for less than this part of the shorter window.
const RELIEVED: f64 = 0.05;

/// The counter at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    /// Nanoseconds of CLOCK_MONOTONIC.
    at: u64,
    /// Seconds for which all tasks have waited.
    total: f64,
}

/// Follows the counter for as long as it is kept. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct StallSeries {
    samples: Arc<Mutex<Vec<Sample>>>,
    _task: Arc<AbortOnDropHandle<()>>,
}

impl StallSeries {
    /// Begins to sample.
    ///
    /// # Errors
    /// The kernel has no pressure stall information.
    pub(super) fn follow() -> anyhow::Result<Self> {
        let samples = Arc::new(Mutex::new(vec![sample()?]));
        let taken = samples.clone();
        let task = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(PERIOD);
            ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                if let Ok(sample) = sample() {
                    taken.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
                }
            }
        });
        Ok(Self { samples, _task: Arc::new(AbortOnDropHandle::new(task)) })
    }

    /// When both windows of the policy were at its threshold for the first time.
    pub(super) fn held(&self) -> Option<u64> {
        held(&self.all())
    }

    /// When the node was relieved for the first time after `held`.
    pub(super) fn relieved(&self, held: u64) -> Option<u64> {
        relieved(&self.all(), held)
    }

    /// The part of the last five seconds in which all tasks waited.
    pub(super) fn share(&self) -> Option<f64> {
        let samples = self.all();
        share(&samples, samples.len().checked_sub(1)?, WINDOWS[1])
    }

    fn all(&self) -> Vec<Sample> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn held(samples: &[Sample]) -> Option<u64> {
    let is_held = |index: &usize| {
        WINDOWS.iter().all(|window| share(samples, *index, *window).is_some_and(|share| share >= THRESHOLD))
    };
    (0..samples.len()).find(is_held).map(|index| samples[index].at)
}

fn relieved(samples: &[Sample], held: u64) -> Option<u64> {
    let is_relieved = |index: &usize| {
        samples[*index].at > held && share(samples, *index, WINDOWS[0]).is_some_and(|share| share < RELIEVED)
    };
    (0..samples.len()).find(is_relieved).map(|index| samples[index].at)
}

/// The part of the window before a sample in which all tasks waited; the window begins at the latest sample that is old
/// enough, `None` if there is none.
fn share(samples: &[Sample], index: usize, window: f64) -> Option<f64> {
    let now = samples[index];
    let before = samples[..index].iter().rev().find(|before| seconds(before.at, now.at) >= window)?;
    Some((now.total - before.total) / seconds(before.at, now.at))
}

fn sample() -> anyhow::Result<Sample> {
    let text = std::fs::read_to_string(PATH).with_context(|| format!("cannot read {PATH}"))?;
    let total = parse_full(&text).with_context(|| format!("{PATH} has no usable line full"))?;
    Ok(Sample { at: monotonic_now()?, total })
}

/// `full avg10=0.00 avg60=0.00 avg300=0.00 total=MICROSECONDS`
fn parse_full(text: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with("full "))?;
    let total = line.split(' ').find_map(|word| word.strip_prefix("total="))?;
    Some(total.parse::<u64>().ok()? as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten samples a second; all tasks wait for this part of each second.
    fn series(shares: &[f64]) -> Vec<Sample> {
        let (mut total, mut samples) = (0.0, vec![Sample { at: 0, total: 0.0 }]);
        for (second, share) in shares.iter().enumerate() {
            for tenth in 1..=10 {
                total += share / 10.0;
                samples.push(Sample { at: (second as u64 * 10 + tenth) * 100_000_000, total });
            }
        }
        samples
    }

    #[test]
    fn the_counter_of_all_tasks_is_read() {
        let text =
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n";
        assert_eq!(parse_full(text), Some(1.5));
        assert_eq!(parse_full("some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"), None);
    }

    #[test]
    fn the_threshold_holds_once_both_windows_are_at_it() {
        assert_eq!(held(&series(&[0.1; 20])), None);
        assert_eq!(held(&series(&[0.0, 0.0, 0.0, 0.0, 0.9, 0.0, 0.0])), None, "a burst");
        let at = held(&series(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5])).unwrap();
        assert!((6_900_000_000..=7_200_000_000).contains(&at), "1 of 5 seconds: {at}");
    }

    #[test]
    fn a_node_is_relieved_after_a_calm_second() {
        let samples = series(&[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0]);
        let at = relieved(&samples, 6_000_000_000).unwrap();
        assert!((6_900_000_000..=7_100_000_000).contains(&at), "{at}");
        assert_eq!(relieved(&series(&[0.5; 9]), 6_000_000_000), None);
    }
}
