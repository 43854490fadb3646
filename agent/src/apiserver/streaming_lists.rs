//! Streaming lists (KEP-3157): watches that send the existing objects first. When one is complete, and when a watch lists
//! instead; the same for watches of many objects ([`super::watch`]) and of one. Pure.

use std::time::Duration;

use kube::core::watch::Bookmark;
use tokio::time::Instant;

use super::watch_errors::is_refusal;
use super::watch_errors::is_silence;

/// Annotation of the bookmark that ends a streaming list.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";
/// Streaming lists of one watch that may fail in a row. Then it lists: some servers never catch up or cannot serve a
/// streaming list although they accept it, and some proxies let none through.
pub(crate) const MOST_FAILED: u32 = 3;
/// How long after its timeout a watch may end.
const END_GRACE: Duration = Duration::from_secs(15);

/// True if the bookmark ends a streaming list: what the watch has sent before are all objects.
pub(crate) fn is_complete(bookmark: &Bookmark) -> bool {
    bookmark.metadata.annotations.get(INITIAL_EVENTS_END).is_some_and(|value| value == "true")
}

/// Until when a watch that was opened at `opened`, for a number of seconds, may last. Its end may never arrive.
pub(crate) fn overdue_at(opened: Instant, seconds: u64) -> Instant {
    opened + Duration::from_secs(seconds) + END_GRACE
}

/// Whether the next list of a watch is a streaming list.
#[derive(Debug)]
pub(crate) struct StreamingLists {
    are_wanted: bool,
    /// Those that have failed in a row.
    failed: u32,
}

impl Default for StreamingLists {
    fn default() -> Self {
        Self { are_wanted: true, failed: 0 }
    }
}

impl StreamingLists {
    /// False if the watch has to list.
    pub(crate) fn are_wanted(&self) -> bool {
        self.are_wanted
    }

    /// One has ended before it was complete; without an error if the server has ended it. `is_opened`: its head had arrived.
    /// Counts if every further one may end in this way; one that was silent has delayed all objects long enough.
    pub(crate) fn failed(&mut self, error: Option<&kube::Error>, is_opened: bool) {
        let is_broken_off = is_opened && !matches!(error, Some(kube::Error::Api(_)));
        if is_broken_off || error.is_some_and(is_refusal) {
            self.failed += 1;
            self.are_wanted &= self.failed < MOST_FAILED && !error.is_some_and(is_silence);
        }
    }

    /// The server does not support or does not permit any.
    pub(crate) fn unsupported(&mut self) {
        self.are_wanted = false;
    }

    /// The server does not permit to list, but may permit to watch by now.
    pub(crate) fn retry(&mut self) {
        self.are_wanted = true;
    }

    /// A list was completed, of either kind: the next one may stream.
    pub(crate) fn completed(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::watch_errors::silence;
    use super::*;

    fn api(code: u16) -> kube::Error {
        let status = json!({"status": "Failure", "message": "x", "reason": "x", "code": code});
        kube::Error::Api(serde_json::from_value(status).expect("a status"))
    }

    fn broken_off() -> kube::Error {
        kube::Error::ReadEvents(std::io::Error::other("reset"))
    }

    /// How many may fail in a row until the watch lists.
    fn failures(error: Option<&kube::Error>, is_opened: bool) -> Option<u32> {
        let mut lists = StreamingLists::default();
        (1..10).find(|_| {
            lists.failed(error, is_opened);
            !lists.are_wanted()
        })
    }

    #[test]
    fn a_watch_lists_after_failures_that_may_be_those_of_all_streaming_lists() {
        for is_opened in [true, false] {
            assert_eq!(failures(Some(&api(410)), is_opened), Some(MOST_FAILED), "the server lags behind");
            assert_eq!(failures(Some(&api(503)), is_opened), Some(MOST_FAILED));
            assert_eq!(failures(Some(&api(429)), is_opened), None);
            assert_eq!(failures(Some(&silence(Duration::from_secs(30))), is_opened), Some(1));
        }
        assert_eq!(failures(None, true), Some(MOST_FAILED), "the server ends it");
        assert_eq!(failures(Some(&broken_off()), true), Some(MOST_FAILED));
        assert_eq!(failures(Some(&broken_off()), false), None, "the server is not available");
    }

    #[test]
    fn lists_stream_again_after_a_complete_one_and_once_more_without_permission_to_list() {
        let mut lists = StreamingLists::default();
        for _ in 0..MOST_FAILED {
            lists.failed(None, true);
        }
        lists.retry();
        assert!(lists.are_wanted());
        lists.failed(None, true);
        assert!(!lists.are_wanted(), "the failures before count");
        lists.completed();
        lists.failed(None, true);
        assert!(lists.are_wanted());
        lists.unsupported();
        assert!(!lists.are_wanted());
    }

    #[test]
    fn a_bookmark_ends_a_list_only_with_its_annotation() {
        let bookmark = |annotations| {
            let mark = json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"resourceVersion": "1", "annotations": annotations}});
            serde_json::from_value::<Bookmark>(mark).expect("a bookmark")
        };
        assert!(is_complete(&bookmark(json!({"k8s.io/initial-events-end": "true"}))));
        assert!(!is_complete(&bookmark(json!({"k8s.io/initial-events-end": "false"}))));
        assert!(!is_complete(&bookmark(json!({}))));
    }
}
