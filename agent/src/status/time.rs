//! Times as the API keeps them: whole seconds.

use std::time::SystemTime;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

/// From a runtime timestamp, nanoseconds since the Unix epoch.
pub(super) fn of_nanos(nanos: i64) -> Time {
    of_seconds(nanos.div_euclid(1_000_000_000))
}

/// From the wall clock. A clock before 1970 counts as 1970.
pub(super) fn of_wall(now: SystemTime) -> Time {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    of_seconds(i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

/// A second beyond the calendar counts as its end.
fn of_seconds(second: i64) -> Time {
    let end = if second < 0 { Timestamp::MIN } else { Timestamp::MAX };
    Time(Timestamp::from_second(second).unwrap_or(end))
}
