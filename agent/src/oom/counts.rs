//! OOM events of containers over all their instances, for `container_oom_events_total`: cAdvisor's series ends with the
//! container's cgroup, which the kill itself often ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use crate::model::ContainerId;
use crate::model::OomScope;
use crate::model::OomVerdict;
use crate::model::PodRef;
use crate::model::PodUid;

/// Pods that are remembered at most; they are removed with the pod.
const MAX_PODS: usize = 4096;

/// Counts of OOM events. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct OomCounts(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    pods: HashMap<PodUid, PodCounts>,
    node: u64,
}

#[derive(Debug)]
struct PodCounts {
    pod: PodRef,
    containers: HashMap<String, ContainerCounts>,
}

#[derive(Debug, Default)]
struct ContainerCounts {
    /// The instance of the last event.
    last: Option<ContainerId>,
    events: u64,
    /// Processes killed in that instance.
    kills: u64,
}

/// OOM events of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomEvents {
    /// The pod.
    pub pod: PodRef,
    /// The container's name.
    pub container: String,
    /// The instance of the last event.
    pub last: Option<ContainerId>,
    /// Events of all instances.
    pub events: u64,
    /// Processes killed in the last instance.
    pub kills: u64,
}

impl OomCounts {
    /// Counts a verdict: several victims of one event count once. As in cAdvisor an OOM event of the node is
    /// not one of the container.
    pub(super) fn add(&self, verdict: &OomVerdict) {
        let is_event = !verdict.is_group_member();
        let is_node = verdict.scope == OomScope::Node;
        let mut counts = self.lock();
        counts.node += u64::from(is_event && is_node);
        let (Some(pod), Some(container)) = (&verdict.pod, &verdict.container) else { return };
        if container.name.is_empty() {
            return;
        }
        if counts.pods.len() >= MAX_PODS && !counts.pods.contains_key(&pod.uid) {
            return;
        }
        let of_pod = || PodCounts { pod: pod.clone(), containers: HashMap::new() };
        let counts = counts.pods.entry(pod.uid.clone()).or_insert_with(of_pod);
        let counts = counts.containers.entry(container.name.clone()).or_default();
        if counts.last.as_ref() != Some(&container.id) {
            counts.last = Some(container.id.clone());
            counts.kills = 0;
        }
        counts.kills += 1;
        counts.events += u64::from(is_event && !is_node);
    }

    /// The pod is gone.
    pub fn remove(&self, uid: &PodUid) {
        self.lock().pods.remove(uid);
    }

    /// OOM events of the node.
    pub fn of_node(&self) -> u64 {
        self.lock().node
    }

    /// All containers with OOM events.
    pub fn all(&self) -> Vec<OomEvents> {
        let counts = self.lock();
        let of_pod = |of: &PodCounts| {
            let pod = of.pod.clone();
            of.containers
                .iter()
                .map(move |(name, counts)| OomEvents {
                    pod: pod.clone(),
                    container: name.clone(),
                    last: counts.last.clone(),
                    events: counts.events,
                    kills: counts.kills,
                })
                .collect::<Vec<_>>()
        };
        counts.pods.values().flat_map(of_pod).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OomEvents {
    /// Events of all instances, with the kills that instance `id` counted (`counter`, its cgroup's) and no verdict
    /// covers, such as those before the agent started.
    pub fn with_counter(&self, id: &ContainerId, counter: Option<u64>) -> u64 {
        let covered = if self.last.as_ref() == Some(id) { self.kills } else { 0 };
        self.events + counter.unwrap_or(0).saturating_sub(covered)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::model::KernelMoment;
    use crate::model::OomConfidence;
    use crate::model::OomContainer;
    use crate::model::OomGroup;
    use crate::model::OomRecord;
    use crate::model::OomTime;
    use crate::oom::verdict::decide;

    fn verdict(id: &str, group: OomGroup) -> OomVerdict {
        let record = OomRecord::new(OomConfidence::Kernel, KernelMoment(Instant::now()));
        let mut verdict = decide(&record, None, false, OomTime(0));
        verdict.pod = Some(PodRef { uid: "u".into(), namespace: "ns".into(), name: "p".into() });
        verdict.container = Some(OomContainer { id: id.into(), name: "c".to_owned() });
        verdict.group = group;
        verdict
    }

    #[test]
    fn counts_go_on_over_instances_and_end_with_the_pod() {
        let counts = OomCounts::default();
        counts.add(&verdict("a", OomGroup::Single));
        counts.add(&verdict("b", OomGroup::Chosen));
        counts.add(&verdict("b", OomGroup::Member));
        let [found] = &counts.all()[..] else { panic!("one container") };
        assert_eq!((found.events, found.kills, found.container.as_str()), (2, 2, "c"));
        assert_eq!(found.with_counter(&"b".into(), Some(2)), 2, "the counter is covered");
        assert_eq!(found.with_counter(&"b".into(), Some(5)), 5, "three kills without a verdict");
        assert_eq!(found.with_counter(&"c".into(), Some(1)), 3, "one in a new instance");
        assert_eq!(found.with_counter(&"c".into(), None), 2);
        counts.remove(&"u".into());
        assert!(counts.all().is_empty());
    }

    #[test]
    fn of_so_many_pods_no_more_are_remembered() {
        let counts = OomCounts::default();
        let add = |uid: &str| {
            let pod = PodRef { uid: uid.into(), namespace: "ns".into(), name: "p".into() };
            counts.add(&OomVerdict { pod: Some(pod), ..verdict("a", OomGroup::Single) });
        };
        let kills = |uid: &str| counts.all().iter().find(|of| of.pod.uid == uid.into()).map(|of| of.kills);
        (0..MAX_PODS).for_each(|pod| add(&pod.to_string()));
        add("one more");
        add("0");
        assert_eq!((counts.all().len(), kills("one more"), kills("0")), (MAX_PODS, None, Some(2)));
        counts.remove(&"1".into());
        add("one more");
        assert_eq!((counts.all().len(), kills("one more")), (MAX_PODS, Some(1)), "there is room again");
    }

    #[test]
    fn what_has_no_container_is_not_counted() {
        let counts = OomCounts::default();
        counts.add(&OomVerdict { container: None, ..verdict("a", OomGroup::Single) });
        counts.add(&OomVerdict { pod: None, ..verdict("a", OomGroup::Single) });
        assert!(counts.all().is_empty());
    }

    #[test]
    fn an_event_of_the_node_is_not_the_containers() {
        let counts = OomCounts::default();
        counts.add(&OomVerdict { scope: OomScope::Node, ..verdict("a", OomGroup::Single) });
        let [found] = &counts.all()[..] else { panic!("one container") };
        assert_eq!((counts.of_node(), found.with_counter(&"a".into(), Some(1))), (1, 0));
    }
}
