//! What the API server is known to know of one pod: single-threaded memory of the manager, no I/O.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod as ApiPod;

use crate::model::Pod;

/// One pod's dealings with the API server.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// The last answer, while it is newer than what the watch has brought.
    answer: Option<Pod>,
    /// A call was lost: the copy is not to be believed before it was read again.
    pub unsure: bool,
    /// Calls that failed since the last one that did not.
    pub failures: u32,
    /// The newest version of the status whose way has been measured.
    pub measured: u64,
    /// Nothing is left to do while these two are the newest: the status' version and the copy.
    settled: Option<(u64, Mark)>,
    /// A UID that the API server no longer has. It will never have it again.
    denied: Option<String>,
}

/// Tells one state of one object from another.
type Mark = (Option<String>, Option<String>);

fn mark(pod: &ApiPod) -> Mark {
    (pod.metadata.uid.clone(), pod.metadata.resource_version.clone())
}

/// Versions of one object grow (KEP-5504); a version that is no number is of unknown age.
fn age(pod: &ApiPod) -> Option<u128> {
    pod.metadata.resource_version.as_deref()?.parse().ok()
}

impl Told {
    /// The newest copy: the watch's, or the last answer.
    pub(super) fn newest(&mut self, watched: Pod) -> Pod {
        let is_newer = |answer: &Pod| {
            let same = answer.metadata.uid == watched.metadata.uid;
            same && age(answer).zip(age(&watched)).is_some_and(|(answer, watched)| answer > watched)
        };
        match self.answer.take_if(|answer| !is_newer(answer)) {
            None => self.answer.clone().unwrap_or(watched),
            Some(_) => watched,
        }
    }

    /// The API server answered with the pod.
    pub(super) fn answered(&mut self, pod: ApiPod) {
        self.answer = Some(Arc::new(pod));
        self.unsure = false;
        self.failures = 0;
    }

    /// The API server has no pod of this UID: what the watch says of it is out of date.
    pub(super) fn denied(&mut self, copy: &ApiPod) {
        *self = Self { denied: copy.metadata.uid.clone(), measured: self.measured, ..Self::default() };
    }

    /// Nothing is left to do for this version, by this copy.
    pub(super) fn settle(&mut self, version: u64, copy: &ApiPod) {
        self.settled = Some((version, mark(copy)));
        self.failures = 0;
    }

    /// Nothing can have changed since it was settled, or denied.
    pub(super) fn is_done(&self, version: u64, copy: &ApiPod) -> bool {
        let denied = self.denied.is_some() && self.denied == copy.metadata.uid;
        denied || self.settled.as_ref().is_some_and(|done| *done == (version, mark(copy)))
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
    fn the_newer_of_answer_and_watch_counts() {
        let table = [
            (None, ("u", "5"), ("u", "5")),
            (Some(("u", "7")), ("u", "5"), ("u", "7")),
            (Some(("u", "10")), ("u", "9"), ("u", "10")),
            (Some(("u", "7")), ("u", "8"), ("u", "8")),
            (Some(("u", "7")), ("other", "5"), ("other", "5")),
            (Some(("u", "odd")), ("u", "5"), ("u", "5")),
        ];
        for (answer, watched, newest) in table {
            let mut told = Told::default();
            if let Some((uid, version)) = answer {
                told.answered(Arc::unwrap_or_clone(pod(uid, version)));
            }
            assert_eq!(told.newest(pod(watched.0, watched.1)), pod(newest.0, newest.1), "{answer:?} {watched:?}");
        }
    }

    #[test]
    fn an_answer_is_dropped_once_the_watch_has_caught_up() {
        let mut told = Told::default();
        told.answered(Arc::unwrap_or_clone(pod("u", "7")));
        assert_eq!(told.newest(pod("u", "7")), pod("u", "7"));
        assert_eq!(told.answer, None);
    }

    #[test]
    fn what_is_done_stays_done_until_something_changes() {
        let mut told = Told::default();
        told.settle(3, &pod("u", "7"));
        assert!(told.is_done(3, &pod("u", "7")));
        assert!(!told.is_done(4, &pod("u", "7")) && !told.is_done(3, &pod("u", "8")));
        told.denied(&pod("u", "9"));
        assert!(told.is_done(5, &pod("u", "4")), "whatever there is to say, and whatever the watch still shows");
        assert!(!told.is_done(5, &pod("new", "9")));
    }
}
