//! Resizes that wait to be allocated, in the kubelet's order. Pure.

use std::cmp::Reverse;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::model::PodUid;

/// What the order depends on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// The pod's requests grow. Those that do not free room for the others.
    pub grows: bool,
    /// `spec.priority`, 0 without: the highest comes first.
    pub priority: Reverse<i32>,
    /// Not of the QoS class Guaranteed.
    pub is_not_guaranteed: bool,
    /// Since when the resize is known to wait; unknown comes last.
    pub waits: Waits,
}

/// Since when a resize waits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waits {
    /// Since its condition was set.
    Since(Time),
    /// No decision on it was made yet.
    New,
}

/// Pods whose resizes wait, each once.
#[derive(Clone, Debug, Default)]
pub struct Queue(Vec<PodUid>);

impl Queue {
    /// Adds a pod, and sorts all of them if it was not there.
    pub fn push(&mut self, uid: PodUid, rank: impl Fn(&PodUid) -> Option<Rank>) {
        if self.0.contains(&uid) {
            return;
        }
        self.0.push(uid);
        // A pod that is gone will be dropped wherever it stands.
        self.0.sort_by_cached_key(|uid| rank(uid).map_or((true, None), |rank| (false, Some(rank))));
    }

    /// Removes a pod.
    pub fn remove(&mut self, uid: &PodUid) {
        self.0.retain(|queued| queued != uid);
    }

    /// All pods in order. Those to be tried again are pushed back with [`Self::restore`].
    pub fn take(&mut self) -> Vec<PodUid> {
        std::mem::take(&mut self.0)
    }

    /// Puts pods back in the order in which they were taken.
    pub fn restore(&mut self, uids: Vec<PodUid>) {
        self.0 = uids;
    }

    /// Nothing waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use k8s_openapi::jiff::Timestamp;

    use super::*;

    fn rank(grows: bool, priority: i32, guaranteed: bool, since: Option<i64>) -> Rank {
        let time = |second| Time(Timestamp::from_second(second).expect("a time"));
        let waits = since.map_or(Waits::New, |second| Waits::Since(time(second)));
        Rank { grows, priority: Reverse(priority), is_not_guaranteed: !guaranteed, waits }
    }

    fn sorted(pods: &[(&str, Rank)]) -> Vec<String> {
        let ranks: HashMap<PodUid, Rank> = pods.iter().map(|(uid, rank)| ((*uid).into(), rank.clone())).collect();
        let mut queue = Queue::default();
        pods.iter().for_each(|(uid, _)| queue.push((*uid).into(), |uid| ranks.get(uid).cloned()));
        queue.take().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn room_is_freed_before_it_is_given_by_priority_class_and_age() {
        let first = [
            ("P1", rank(true, 0, false, None)),
            ("P2", rank(true, 10, false, None)),
            ("P3", rank(false, 0, false, None)),
        ];
        assert_eq!(sorted(&first), ["P3", "P2", "P1"]);
        let equal = [
            ("new", rank(true, 0, false, None)),
            ("young", rank(true, 0, false, Some(20))),
            ("old", rank(true, 0, false, Some(10))),
            ("guaranteed", rank(true, 0, true, None)),
        ];
        assert_eq!(sorted(&equal), ["guaranteed", "old", "young", "new"]);
        let unequal = [("guaranteed", rank(true, 0, true, Some(10))), ("important", rank(true, 10, false, None))];
        assert_eq!(sorted(&unequal), ["important", "guaranteed"]);
    }

    #[test]
    fn a_pod_waits_once() {
        let mut queue = Queue::default();
        let order = |uid: &PodUid| (uid.as_str() != "gone").then(|| rank(true, 0, false, None));
        for uid in ["gone", "a", "b", "a"] {
            queue.push(uid.into(), order);
        }
        queue.remove(&"b".into());
        let uids = queue.take();
        assert_eq!(uids, [PodUid::from("a"), "gone".into()]);
        assert!(queue.is_empty());
        queue.restore(uids);
        assert!(!queue.is_empty());
    }
}
