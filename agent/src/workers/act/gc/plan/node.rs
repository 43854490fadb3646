//! Which dead containers exceed the limits of the node (upstream: `evictContainers`).

use std::collections::HashMap;
use std::collections::HashSet;

use super::Dead;
use super::dead_instances;
use crate::model::ContainerId;
use crate::model::DeadContainerPolicy;
use crate::model::PodSnapshot;

/// A pod whose dead containers count.
pub struct CountedPod<'a> {
    /// What the runtime has of it.
    pub snapshot: &'a PodSnapshot,
    /// It has ended for good: no decision depends on its containers any more.
    pub has_ended: bool,
}

/// The dead instances of one container that are old enough, newest first.
struct Unit<'a> {
    has_ended: bool,
    dead: Vec<Dead<'a>>,
}

impl<'a> Unit<'a> {
    /// Removes the oldest ones beyond the limit.
    fn shrink(&mut self, limit: usize) -> Vec<Dead<'a>> {
        let from = limit.min(self.dead.len());
        let removable = |dead: &mut Dead<'_>| self.has_ended || !dead.is_needed;
        self.dead.extract_if(from.., removable).collect()
    }
}

/// Instances that exceed the limits: of pods that have ended those beyond the limit of their container; then, of all pods
/// while there are more than the node may have, those beyond an equal share for each container, and the oldest. Instances
/// that a pod needs until it has ended count, and stay.
pub fn excess(pods: &[CountedPod<'_>], policy: &DeadContainerPolicy, now: i64) -> HashSet<ContainerId> {
    let mut units: Vec<Unit<'_>> = pods.iter().flat_map(|pod| units_of(pod, policy, now)).collect();
    let mut gone = Vec::new();
    if let Some(limit) = policy.per_container {
        for unit in &mut units {
            let beyond = unit.shrink(limit);
            // Those of other pods are up to their workers.
            gone.extend(beyond.into_iter().filter(|_| unit.has_ended));
        }
    }
    if let Some(total) = policy.total.filter(|total| count(&units) > *total) {
        let share = (total / units.len()).max(1);
        gone.extend(units.iter_mut().flat_map(|unit| unit.shrink(share)));
        gone.extend(oldest(&units, count(&units).saturating_sub(total)));
    }
    gone.into_iter().map(|dead| dead.status.id.clone()).collect()
}

fn units_of<'a>(pod: &CountedPod<'a>, policy: &DeadContainerPolicy, now: i64) -> Vec<Unit<'a>> {
    let mut units: Vec<Unit<'a>> = Vec::new();
    let mut positions: HashMap<&str, usize> = HashMap::new();
    for dead in dead_instances(pod.snapshot) {
        if policy.old_at(dead.status.created_at) > now {
            continue;
        }
        let position = *positions.entry(&dead.status.name).or_insert(units.len());
        match units.get_mut(position) {
            Some(unit) => unit.dead.push(dead),
            None => units.push(Unit { has_ended: pod.has_ended, dead: vec![dead] }),
        }
    }
    units
}

fn count(units: &[Unit<'_>]) -> usize {
    units.iter().map(|unit| unit.dead.len()).sum()
}

/// The oldest instances of all that may be removed, so many at most.
fn oldest<'a>(units: &[Unit<'a>], number: usize) -> Vec<Dead<'a>> {
    let removable = |unit: &'_ Unit<'a>| {
        let has_ended = unit.has_ended;
        unit.dead.clone().into_iter().filter(move |dead| has_ended || !dead.is_needed)
    };
    let mut dead: Vec<Dead<'a>> = units.iter().flat_map(removable).collect();
    dead.sort_by_key(|dead| dead.status.created_at);
    dead.truncate(number);
    dead
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::ContainerStatus;
    use crate::model::testing;

    /// Dead instances of one container, created at these seconds, named after pod and second.
    fn pod(uid: &str, seconds: &[i64]) -> PodSnapshot {
        let instance = |second: &i64| ContainerStatus {
            id: format!("{uid}{second}").into(),
            created_at: testing::at(*second),
            ..testing::exited("c", 0, 1)
        };
        let mut snapshot = testing::snapshot(seconds.iter().map(instance).collect());
        snapshot.pod.uid = uid.into();
        snapshot
    }

    /// As [`pod`], with a newer instance that runs.
    fn running(uid: &str, seconds: &[i64]) -> PodSnapshot {
        let mut snapshot = pod(uid, seconds);
        snapshot.containers.insert(0, testing::running("c", 9));
        snapshot
    }

    fn policy(per_container: Option<usize>, total: Option<usize>) -> DeadContainerPolicy {
        DeadContainerPolicy { per_container, total, ..DeadContainerPolicy::default() }
    }

    /// What exceeds the limits at second 100.
    fn ids(pods: &[(&PodSnapshot, bool)], policy: DeadContainerPolicy) -> Vec<String> {
        let counted = pods.iter().map(|(snapshot, has_ended)| CountedPod { snapshot, has_ended: *has_ended });
        let found = excess(&counted.collect::<Vec<_>>(), &policy, testing::at(100));
        let mut ids: Vec<String> = found.into_iter().map(|id| id.to_string()).collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn containers_share_the_limit_of_the_node_before_the_oldest_go() {
        let (a, b, c) = (running("a", &[9, 8, 7, 6]), running("b", &[5, 4]), running("c", &[3]));
        let all = [(&a, false), (&b, false), (&c, false)];
        for (total, expected) in [
            (None, &[][..]),
            (Some(7), &[]),
            (Some(6), &["a6", "a7"]),
            (Some(5), &["a6", "a7", "a8", "b4"]),
            (Some(3), &["a6", "a7", "a8", "b4"]),
            (Some(2), &["a6", "a7", "a8", "b4", "c3"]),
            (Some(0), &["a6", "a7", "a8", "a9", "b4", "b5", "c3"]),
        ] {
            assert_eq!(ids(&all, policy(None, total)), expected, "{total:?}");
        }
    }

    #[test]
    fn what_a_pod_needs_counts_and_stays_until_the_pod_has_ended() {
        let (a, b) = (pod("a", &[9, 8]), running("b", &[7]));
        for (has_ended, total, expected) in [
            (false, 2, &["a8"][..]),
            (false, 1, &["a8", "b7"]),
            (false, 0, &["a8", "b7"]),
            (true, 1, &["a8", "b7"]),
            (true, 0, &["a8", "a9", "b7"]),
        ] {
            let found = ids(&[(&a, has_ended), (&b, false)], policy(Some(9), Some(total)));
            assert_eq!(found, expected, "{has_ended} {total}");
        }
    }

    #[test]
    fn only_what_has_ended_is_held_to_the_limit_of_each_container() {
        let (a, b) = (pod("a", &[9, 8]), running("b", &[7, 6]));
        for (limit, expected) in [(None, &[][..]), (Some(2), &[]), (Some(1), &["a8"]), (Some(0), &["a8", "a9"])] {
            assert_eq!(ids(&[(&a, true), (&b, false)], policy(limit, None)), expected, "{limit:?}");
        }
        // Those of the other pod do not count for the node either: its worker removes them.
        assert_eq!(ids(&[(&a, true), (&b, false)], policy(Some(1), Some(2))), ["a8"]);
    }

    /// Containers: as many as an object of the API server has room for.
    #[test]
    fn thousands_of_containers_are_counted_each() {
        const COUNT: usize = 20_000;
        let names: Vec<String> = (0..COUNT).map(|number| format!("c{number}")).collect();
        let exited = |attempt| names.iter().map(move |name| testing::exited(name, attempt, 1));
        let many = testing::snapshot(exited(1).chain(exited(0)).collect());
        let counted = [CountedPod { snapshot: &many, has_ended: true }];
        let found = excess(&counted, &policy(Some(1), None), testing::at(100_000));
        assert!(found.len() == COUNT && found.iter().all(|id| id.as_str().ends_with("-0")), "{}", found.len());
    }

    #[test]
    fn young_instances_neither_count_nor_go() {
        let a = running("a", &[99, 98, 9, 8]);
        let aged = |age| DeadContainerPolicy { min_age: Duration::from_secs(age), ..policy(None, Some(1)) };
        assert_eq!(ids(&[(&a, false)], aged(0)), ["a8", "a9", "a98"]);
        assert_eq!(ids(&[(&a, false)], aged(50)), ["a8"]);
        assert_eq!(ids(&[(&a, false)], aged(92)), [""; 0]);
    }
}
