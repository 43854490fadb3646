//! Times as the API keeps them.

use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// To whole seconds. A clock out of the calendar counts as its nearest end.
pub(super) fn seconds(now: SystemTime) -> Time {
    let now = timestamp(now);
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

/// To microseconds.
pub(super) fn micros(now: SystemTime) -> MicroTime {
    let now = timestamp(now);
    MicroTime(Timestamp::from_microsecond(now.as_microsecond()).unwrap_or(now))
}

fn timestamp(now: SystemTime) -> Timestamp {
    Timestamp::try_from(now).unwrap_or(if now < SystemTime::UNIX_EPOCH { Timestamp::MIN } else { Timestamp::MAX })
}
