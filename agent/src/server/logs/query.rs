//! The query of `/containerLogs`. Pure.

use crate::log_format::Stamp;

/// The requested output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogStreams {
    All,
    Stdout,
    Stderr,
}

/// The time of the oldest requested line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Since {
    Beginning,
    /// This many seconds before the request.
    Seconds(i64),
    /// Unix nanoseconds; those of the nearest moment for a time that has none.
    Time(i64),
}

impl Since {
    /// The time as Unix nanoseconds.
    pub(super) fn at(self, now: i64) -> i64 {
        match self {
            Self::Beginning => i64::MIN,
            Self::Seconds(seconds) => now.saturating_sub(seconds.saturating_mul(1_000_000_000)),
            Self::Time(time) => time,
        }
    }
}

/// The query of `/containerLogs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LogQuery {
    pub(super) follow: bool,
    pub(super) previous: bool,
    pub(super) timestamps: bool,
    pub(super) since: Since,
    /// Lines from the end.
    pub(super) tail: Option<u64>,
    /// Bytes to write at most.
    pub(super) limit: Option<u64>,
    /// The requested stream, if any.
    pub(super) stream: Option<LogStreams>,
}

/// An invalid query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadQuery {
    /// A value is not a number or time (400).
    Undecodable,
    /// The values are invalid, alone or together (422).
    Invalid,
}

/// Parses a query; the first value of a repeated parameter is used.
///
/// # Errors
/// The query is invalid.
pub(super) fn parse(query: &[(String, String)]) -> Result<LogQuery, BadQuery> {
    let value = |name: &str| query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
    let flag = |name: &str| value(name).is_some_and(|text| text != "0" && !text.eq_ignore_ascii_case("false"));
    let number = |text: Option<&str>| text.map(str::parse::<i64>).transpose().map_err(|_| BadQuery::Undecodable);
    let tail = match value("tail").filter(|tail| !tail.is_empty()) {
        Some("all") => None,
        Some(tail) => Some(tail),
        None => value("tailLines"),
    };
    let tail = number(tail)?;
    let limit = number(value("limitBytes"))?;
    let seconds = number(value("sinceSeconds"))?;
    let time = match value("sinceTime").filter(|text| !text.is_empty() && *text != "null") {
        Some(text) => Some(Stamp::parse(text.as_bytes()).ok_or(BadQuery::Undecodable)?.nanos),
        None => None,
    };
    let stream = match value("stream") {
        None => None,
        Some("All") => Some(LogStreams::All),
        Some("Stdout") => Some(LogStreams::Stdout),
        Some("Stderr") => Some(LogStreams::Stderr),
        Some(_) => return Err(BadQuery::Invalid),
    };
    let one_stream = matches!(stream, Some(LogStreams::Stdout | LogStreams::Stderr));
    if tail.is_some_and(|tail| tail < 0)
        || limit.is_some_and(|limit| limit < 1)
        || seconds.is_some_and(|seconds| seconds < 1)
        // Also beside a time that is empty: upstream, that is the zero time, which is there.
        || (seconds.is_some() && value("sinceTime").is_some())
        || (one_stream && tail.is_some())
    {
        return Err(BadQuery::Invalid);
    }
    let since = match (seconds, time) {
        (Some(seconds), _) => Since::Seconds(seconds),
        (None, Some(time)) => Since::Time(time),
        (None, None) => Since::Beginning,
    };
    Ok(LogQuery {
        follow: flag("follow"),
        previous: flag("previous"),
        timestamps: flag("timestamps"),
        since,
        tail: tail.and_then(|tail| u64::try_from(tail).ok()),
        limit: limit.and_then(|limit| u64::try_from(limit).ok()),
        stream,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> Result<LogQuery, BadQuery> {
        parse(&super::super::super::answer::query_of(&format!("http://x/?{text}").parse().unwrap()))
    }

    #[test]
    fn flags_are_true_for_all_but_0_and_false() {
        for (text, follow) in [
            ("", false),
            ("follow", true),
            ("follow=", true),
            ("follow=0", false),
            ("follow=FALSE", false),
            ("follow=x", true),
        ] {
            assert_eq!(query(text).unwrap().follow, follow, "{text}");
        }
        assert_eq!(query("follow=0&follow=1").map(|q| q.follow), Ok(false), "the first value counts");
    }

    #[test]
    fn lines_bytes_and_times() {
        let all = query("tailLines=0&limitBytes=1&sinceSeconds=1&timestamps=true&previous=1&stream=All").unwrap();
        assert_eq!((all.tail, all.limit, all.since), (Some(0), Some(1), Since::Seconds(1)));
        assert!(all.timestamps && all.previous && all.stream == Some(LogStreams::All));
        assert_eq!(query("tail=3&tailLines=x").unwrap().tail, Some(3), "the legacy name replaces");
        assert_eq!(query("tail=all&tailLines=5").unwrap().tail, None);
        assert_eq!(query("tail=&tailLines=4").unwrap().tail, Some(4), "an empty legacy name does not");
        let since = query("sinceTime=1970-01-01T01:00:00.5%2B01:00").unwrap().since;
        assert_eq!(since, Since::Time(500_000_000));
        assert_eq!((Since::Seconds(2).at(5_000_000_000), since.at(0)), (3_000_000_000, 500_000_000));
    }

    #[test]
    fn a_time_that_was_never_set_selects_the_whole_log() {
        let since = query("sinceTime=0001-01-01T00:00:00Z").unwrap().since;
        assert_eq!(since.at(0), Since::Beginning.at(0));
        for unset in ["sinceTime=", "sinceTime=null"] {
            assert_eq!(query(unset).map(|query| query.since), Ok(Since::Beginning), "{unset}");
        }
    }

    #[test]
    fn invalid_requests_are_refused() {
        for text in
            ["tailLines=", "tailLines=a", "limitBytes=1.5", "sinceSeconds=9999999999999999999", "sinceTime=today"]
        {
            assert_eq!(query(text), Err(BadQuery::Undecodable), "{text}");
        }
        for text in [
            "tailLines=-1",
            "limitBytes=0",
            "sinceSeconds=0",
            "sinceSeconds=1&sinceTime=2026-01-01T00:00:00Z",
            "sinceSeconds=1&sinceTime=",
            "sinceSeconds=1&sinceTime=null",
            "stream=both",
            "stream=",
            "stream=Stdout&tailLines=1",
        ] {
            assert_eq!(query(text), Err(BadQuery::Invalid), "{text}");
        }
    }
}
