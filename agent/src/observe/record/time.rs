//! Times in records: RFC 3339, UTC, milliseconds. Pure.

use std::time::Duration;
use std::time::SystemTime;

use serde::Deserialize;
use serde::Deserializer;
use serde::Serialize;
use serde::Serializer;

/// Milliseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The last moment that has four digits for the year.
    const LAST: u64 = 253_402_300_799_999;

    /// From nanoseconds since the Unix epoch, the unit of the container runtime; `None` for "never".
    pub fn from_nanos(nanos: i64) -> Option<Self> {
        let millis = u64::try_from(nanos).ok().filter(|nanos| *nanos > 0)? / 1_000_000;
        Some(Self(millis.min(Self::LAST)))
    }

    /// Time from `earlier` to this moment; zero if it is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// This moment, so much earlier.
    pub fn before(self, age: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(age.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Hours, minutes and seconds of the day, UTC.
    pub fn clock(self) -> String {
        let seconds = self.0 / 1000 % 86_400;
        format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let millis = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
        Self(u64::try_from(millis).unwrap_or(Self::LAST).min(Self::LAST))
    }
}

impl std::fmt::Display for Timestamp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let time = SystemTime::UNIX_EPOCH + Duration::from_millis(self.0);
        write!(f, "{}", humantime::format_rfc3339_millis(time))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let time = humantime::parse_rfc3339(&text);
        time.map(Self::from).map_err(|error| serde::de::Error::custom(format!("time {text:?}: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_come_back() {
        let time = Timestamp::from_nanos(1_790_000_000_123_456_789).unwrap();
        assert_eq!(time.to_string(), "2026-09-21T14:13:20.123Z");
        let text = serde_json::to_string(&time).unwrap();
        assert_eq!(serde_json::from_str::<Timestamp>(&text).unwrap(), time);
        assert_eq!(time.clock(), "14:13:20");
        assert_eq!(time.since(time.before(Duration::from_secs(5))), Duration::from_secs(5));
        assert_eq!(time.before(Duration::from_secs(5)).since(time), Duration::ZERO);
    }

    #[test]
    fn zero_is_never_and_no_time_is_out_of_range() {
        assert_eq!(Timestamp::from_nanos(0), None);
        assert_eq!(Timestamp::from_nanos(-5), None);
        assert!(Timestamp::from_nanos(i64::MAX).unwrap().to_string().starts_with("2262-"));
        assert!(serde_json::from_str::<Timestamp>("\"yesterday\"").is_err());
    }
}
