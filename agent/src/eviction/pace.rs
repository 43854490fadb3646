//! When the signals are read again. Pure.

use std::time::Duration;

use super::readings::Readings;
use super::readings::Resource;
use super::readings::limit;
use crate::config::eviction::Threshold;

/// The longest time between two readings, upstream's period.
pub(super) const LONGEST: Duration = Duration::from_secs(10);
/// The shortest.
pub(super) const SHORTEST: Duration = Duration::from_millis(100);
/// Nothing announces that free memory declines before the kernel has to reclaim some: the next reading comes before memory
/// that is used up at this rate, in bytes a second, could reach a threshold.
const FASTEST_GROWTH: i64 = 1 << 30;

/// The time until the next reading. `is_met`: a threshold is met already, and nothing more can be done about it now.
pub(super) fn pause(thresholds: &[Threshold], readings: &Readings, is_met: bool) -> Duration {
    if is_met {
        return LONGEST;
    }
    let of_memory = thresholds.iter().filter(|threshold| Resource::of(threshold.signal) == Resource::Memory);
    let margins = of_memory.filter_map(|threshold| {
        let reading = readings.signals.get(&threshold.signal)?;
        Some(reading.available.saturating_sub(limit(threshold, reading, false).value()).max(0))
    });
    let nearest = margins.min().and_then(|margin| u64::try_from(margin.saturating_mul(1000) / FASTEST_GROWTH).ok());
    nearest.map_or(LONGEST, |millis| Duration::from_millis(millis).clamp(SHORTEST, LONGEST))
}
