//! The node's local time (`/etc/localtime`, `TZ`), for names of files that people read.

use std::mem::MaybeUninit;

use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::civil::DateTime;
use k8s_openapi::jiff::tz::Offset;

/// The present local time; UTC if the system has no time zone data. To be used for names only: it may be set back.
pub fn now() -> DateTime {
    at(Timestamp::now())
}

fn at(time: Timestamp) -> DateTime {
    let local = time.as_second().checked_add(offset(time.as_second())).and_then(|at| Timestamp::from_second(at).ok());
    Offset::UTC.to_datetime(local.unwrap_or(time))
}

/// Seconds that local time is ahead of UTC.
fn offset(seconds: i64) -> i64 {
    let mut parts = MaybeUninit::<libc::tm>::uninit();
    // SAFETY: both pointers are valid during the call, which reads the first and writes the second. It initializes the
    // structure unless it returns null.
    let found = unsafe { libc::localtime_r(&raw const seconds, parts.as_mut_ptr()).as_ref() };
    found.map_or(0, |parts| parts.tm_gmtoff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_time_differs_from_utc_by_the_offset() {
        let time: Timestamp = "2026-03-04T05:06:07Z".parse().expect("a time");
        let ahead = at(time).duration_since(Offset::UTC.to_datetime(time)).as_secs();
        assert_eq!(ahead, offset(time.as_second()));
        assert!(ahead.abs() < 24 * 3600 && ahead % 60 == 0, "{ahead} s");
    }
}
