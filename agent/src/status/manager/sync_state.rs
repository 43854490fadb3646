//! What is known of one pod at the API server: last answer, failures, what is already in sync. No I/O.

use std::hash::DefaultHasher;
use std::hash::Hash as _;
use std::hash::Hasher as _;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use serde_json::Value;
use tokio::time::Instant;

use super::backoff;
use crate::model::Pod;

/// Sync state of one pod.
#[derive(Debug, Default)]
pub(super) struct SyncState {
    /// The last answer, while it is newer than what the watch has brought.
    answer: Option<Pod>,
    /// An answer was lost: the pod must be read again before the copy is used.
    pub answer_lost: bool,
    /// Calls without an answer in a row. That a pod can be read ends no such series: its status may be lost all the while.
    failures: u32,
    /// Why the last of them failed.
    reason: String,
    /// The newest status version whose latency was observed.
    pub measured: u64,
    /// Status version and copy that are in sync.
    in_sync: Option<(u64, ObjectVersion)>,
    /// The last patch that was answered: status version, the copy after it, hash of its body.
    patched: Option<(u64, ObjectVersion, u64)>,
    /// A UID that the API server no longer has and never will have again.
    gone: Option<String>,
    /// The API server has answered that it has no such pod.
    absent: Option<Absence>,
}

/// A 404 from the API server. It is not final while the watch shows the pod: a proxy may have sent it.
#[derive(Debug)]
struct Absence {
    uid: Option<String>,
    /// Of the copy for which it was answered.
    revision: Option<u128>,
    /// Answers of this kind in a row.
    answers: u32,
    /// When the pod is read again.
    until: Instant,
}

/// Whether a pod must be read before the watch's copy of it is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reading {
    /// The copy can be used.
    NotNeeded,
    /// Now.
    Due,
    /// Yes, and not yet.
    Later,
}

/// Identifies one state of one API object: UID and resource version.
type ObjectVersion = (Option<String>, Option<String>);

fn object_version(pod: &ApiPod) -> ObjectVersion {
    (pod.metadata.uid.clone(), pod.metadata.resource_version.clone())
}

/// Resource versions of one object are comparable numbers (KEP-5504); `None` if this one is not a number.
fn revision(pod: &ApiPod) -> Option<u128> {
    pod.metadata.resource_version.as_deref()?.parse().ok()
}

/// Identifies the body of a patch.
pub(super) fn patch_hash(patch: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    patch.to_string().hash(&mut hasher);
    hasher.finish()
}

impl SyncState {
    /// The newest copy: the watch's, or the last answer.
    pub(super) fn newest(&mut self, watched: Pod) -> Pod {
        let is_newer = |answer: &Pod| {
            let same = answer.metadata.uid == watched.metadata.uid;
            same && revision(answer).zip(revision(&watched)).is_some_and(|(answer, watched)| answer > watched)
        };
        match self.answer.take_if(|answer| !is_newer(answer)) {
            None => self.answer.clone().unwrap_or(watched),
            Some(_) => watched,
        }
    }

    /// The API server answered with the pod.
    pub(super) fn answered(&mut self, pod: ApiPod) {
        self.answer = Some(Arc::new(pod));
        self.answer_lost = false;
        self.absent = None;
    }

    /// A call was not answered. Returns the number of such calls in a row, and whether the reason is another than the last
    /// time.
    pub(super) fn failed(&mut self, reason: &str) -> (u32, bool) {
        self.failures = self.failures.saturating_add(1);
        let is_new = self.reason != reason;
        if is_new {
            reason.clone_into(&mut self.reason);
        }
        (self.failures, is_new)
    }

    fn succeeded(&mut self) {
        self.failures = 0;
        self.reason.clear();
    }

    /// The API server answered with the pod, which cannot be decoded: `copy` is the newest that is known. A patch for the
    /// status version `patched` was executed, and is not sent again.
    pub(super) fn answered_undecodably(&mut self, patched: Option<u64>, copy: &ApiPod) {
        self.answer_lost = false;
        self.absent = None;
        if let Some(version) = patched {
            self.set_in_sync(version, copy);
        }
    }

    /// A patch for this status version was answered with `copy`.
    pub(super) fn set_patched(&mut self, version: u64, patch_hash: u64, copy: &ApiPod) {
        self.patched = Some((version, object_version(copy), patch_hash));
        self.succeeded();
    }

    /// True if this very patch led to this copy: the API server does not keep what it sets, for example a field whose
    /// feature gate is off there. Sending it again would never end.
    pub(super) fn is_without_effect(&self, version: u64, patch_hash: u64, copy: &ApiPod) -> bool {
        self.patched.as_ref().is_some_and(|patched| *patched == (version, object_version(copy), patch_hash))
    }

    /// The pod of this UID was deleted, or another one has its name: the watch lags behind.
    pub(super) fn set_gone(&mut self, copy: &ApiPod) {
        *self = Self { gone: copy.metadata.uid.clone(), measured: self.measured, ..Self::default() };
    }

    /// The API server has no such pod. Most often the watch lags behind, and no request is needed; if it still shows this
    /// UID after a while, or a newer copy of it, the pod is read again. Returns that while, which grows.
    pub(super) fn set_absent(&mut self, copy: &ApiPod, now: Instant) -> Duration {
        let uid = copy.metadata.uid.clone();
        let known = self.absent.as_ref().filter(|absent| absent.uid == uid);
        let answers = known.map_or(0, |absent| absent.answers).saturating_add(1);
        let wait = backoff::while_absent(answers);
        let absent = Some(Absence { uid, revision: revision(copy), answers, until: now + wait });
        *self = Self { absent, measured: self.measured, ..Self::default() };
        wait
    }

    /// Whether the pod must be read before the watch's copy is used.
    pub(super) fn reading(&self, watched: &ApiPod, now: Instant) -> Reading {
        match self.absent.as_ref().filter(|absent| absent.uid == watched.metadata.uid) {
            Some(absent) if now < absent.until && revision(watched) <= absent.revision => Reading::Later,
            Some(_) => Reading::Due,
            None if self.answer_lost => Reading::Due,
            None => Reading::NotNeeded,
        }
    }

    /// This status version and this copy agree.
    pub(super) fn set_in_sync(&mut self, version: u64, copy: &ApiPod) {
        self.in_sync = Some((version, object_version(copy)));
        self.succeeded();
    }

    /// True if this version and copy are in sync, or the pod is gone.
    pub(super) fn is_in_sync(&self, version: u64, copy: &ApiPod) -> bool {
        let gone = self.gone.is_some() && self.gone == copy.metadata.uid;
        gone || self.in_sync.as_ref().is_some_and(|known| *known == (version, object_version(copy)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str, version: &str) -> Pod {
        let mut pod = ApiPod::default();
        pod.metadata.uid = Some(uid.to_owned());
        pod.metadata.resource_version = Some(version.to_owned());
        Arc::new(pod)
    }

    #[test]
    fn the_newer_of_answer_and_watched_copy_is_used() {
        let table = [
            (None, ("u", "5"), ("u", "5")),
            (Some(("u", "7")), ("u", "5"), ("u", "7")),
            (Some(("u", "10")), ("u", "9"), ("u", "10")),
            (Some(("u", "7")), ("u", "8"), ("u", "8")),
            (Some(("u", "7")), ("other", "5"), ("other", "5")),
            (Some(("u", "odd")), ("u", "5"), ("u", "5")),
        ];
        for (answer, watched, newest) in table {
            let mut state = SyncState::default();
            if let Some((uid, version)) = answer {
                state.answered(Arc::unwrap_or_clone(pod(uid, version)));
            }
            assert_eq!(state.newest(pod(watched.0, watched.1)), pod(newest.0, newest.1), "{answer:?} {watched:?}");
        }
    }

    #[test]
    fn an_answer_is_dropped_once_the_watch_has_caught_up() {
        let mut state = SyncState::default();
        state.answered(Arc::unwrap_or_clone(pod("u", "7")));
        assert_eq!(state.newest(pod("u", "7")), pod("u", "7"));
        assert_eq!(state.answer, None);
    }

    #[test]
    fn failures_count_until_a_status_is_sent_and_each_reason_is_new_once() {
        let (mut state, read) = (SyncState::default(), pod("u", "7"));
        assert_eq!(state.failed("500 a"), (1, true));
        state.answered(Arc::unwrap_or_clone(read.clone()));
        assert_eq!(state.failed("500 a"), (2, false), "it was only read in between");
        assert_eq!(state.failed("500 b"), (3, true));
        state.set_patched(1, 2, &read);
        assert_eq!(state.failed("500 b"), (1, true));
        state.set_in_sync(1, &read);
        assert_eq!(state.failed("500 b"), (1, true));
    }

    #[test]
    fn stays_in_sync_until_version_or_copy_changes() {
        let mut state = SyncState::default();
        state.set_in_sync(3, &pod("u", "7"));
        assert!(state.is_in_sync(3, &pod("u", "7")));
        assert!(!state.is_in_sync(4, &pod("u", "7")) && !state.is_in_sync(3, &pod("u", "8")));
        state.set_gone(&pod("u", "9"));
        assert!(state.is_in_sync(5, &pod("u", "4")), "deleted pods need nothing, whatever the watch still shows");
        assert!(!state.is_in_sync(5, &pod("new", "9")));
    }

    #[test]
    fn an_absent_pod_is_read_again_after_growing_pauses() {
        let (mut state, mut now) = (SyncState::default(), Instant::now());
        let known = pod("u", "7");
        assert_eq!(state.reading(&known, now), Reading::NotNeeded);
        for seconds in [10, 20, 40] {
            let wait = state.set_absent(&known, now);
            assert_eq!(wait, Duration::from_secs(seconds));
            assert_eq!(state.reading(&known, now + wait - Duration::from_secs(1)), Reading::Later);
            assert_eq!(state.reading(&known, now + wait), Reading::Due);
            assert_eq!(state.reading(&pod("u", "6"), now), Reading::Later, "the watch lags behind");
            assert_eq!(state.reading(&pod("u", "10"), now), Reading::Due, "the watch shows a newer copy");
            assert_eq!(state.reading(&pod("new", "9"), now), Reading::NotNeeded, "another mirror pod");
            now += wait;
        }
        state.answered(Arc::unwrap_or_clone(pod("u", "9")));
        assert_eq!(state.reading(&known, now), Reading::NotNeeded);
        assert_eq!(state.set_absent(&known, now), Duration::from_secs(10));
    }
}
