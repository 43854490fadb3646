//! Values and labels that several groups of families spell.

/// A count, or a number of bytes, as the value of a gauge.
pub(super) fn gauge(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

/// The status code of an answer as a label; `None` without an answer.
pub(super) fn code(status: Option<u16>) -> String {
    status.map_or_else(|| "<error>".to_owned(), |status| status.to_string())
}
