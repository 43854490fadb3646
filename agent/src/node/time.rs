//! API times.

use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// In whole seconds; a time out of range becomes the nearest valid one.
pub(super) fn seconds(now: SystemTime) -> Time {
    let now = timestamp(now);
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

/// In microseconds.
pub(super) fn micros(now: SystemTime) -> MicroTime {
    let now = timestamp(now);
    MicroTime(Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now))
}

/// In microseconds, and later than `before`.
pub(super) fn micros_after(now: SystemTime, before: Option<&MicroTime>) -> MicroTime {
    let now = micros(now);
    match before {
        Some(before) if *before >= now => {
            Timestamp::from_microsecond(before.0.as_microsecond().saturating_add(1)).map_or(now, MicroTime)
        }
        _ => now,
    }
}

fn timestamp(now: SystemTime) -> Timestamp {
    Timestamp::try_from(now).unwrap_or(if now < SystemTime::UNIX_EPOCH { Timestamp::MIN } else { Timestamp::MAX })
}
