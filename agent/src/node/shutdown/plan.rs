//! Order of termination. Pure.

use std::time::Duration;

use crate::model::Pod;
use crate::model::spec::CRITICAL_PRIORITY as CRITICAL;

/// Pods from this priority up to that of the next group, and their shutdown period.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Group {
    /// The lowest priority of the group; the first group includes lower ones.
    pub priority: i32,
    /// For all pods of the group together.
    pub period: Duration,
}

/// The groups in order of termination: `by_priority` (`priority`, seconds) if not empty, else `total`, of which `critical`
/// is reserved for critical pods. Empty if none of them is configured.
pub fn groups(total: Duration, critical: Duration, by_priority: &[(i32, i64)]) -> Vec<Group> {
    let mut groups: Vec<Group> = by_priority
        .iter()
        .map(|(priority, seconds)| Group {
            priority: *priority,
            period: Duration::from_secs(u64::try_from(*seconds).unwrap_or(0)),
        })
        .collect();
    if groups.is_empty() && !total.is_zero() && critical <= total {
        // Whole seconds, as in the kubelet.
        let seconds = |period: Duration| Duration::from_secs(period.as_secs());
        groups.push(Group { priority: 0, period: seconds(total - critical) });
        groups.push(Group { priority: CRITICAL, period: seconds(critical) });
    }
    groups.sort_by_key(|group| group.priority);
    groups
}

/// Maximum delay of the shutdown. Periods may be of any length.
pub(super) fn needed(groups: &[Group]) -> Duration {
    groups.iter().map(|group| group.period).fold(Duration::ZERO, Duration::saturating_add)
}

/// The pods of each group, in order of termination; groups without pods are omitted.
pub(super) fn order(groups: &[Group], pods: Vec<Pod>) -> Vec<(Group, Vec<Pod>)> {
    let mut ordered: Vec<(Group, Vec<Pod>)> = groups.iter().map(|group| (*group, Vec::new())).collect();
    for pod in pods {
        let priority = pod.spec.as_ref().and_then(|spec| spec.priority).unwrap_or(0);
        let group = groups.iter().rposition(|group| group.priority <= priority).unwrap_or(0);
        if let Some((_, members)) = ordered.get_mut(group) {
            members.push(pod);
        }
    }
    ordered.retain(|(_, members)| !members.is_empty());
    ordered
}

/// Grace period of a pod in seconds: the group's period, or its own if that is shorter.
pub(super) fn grace(group: &Group, pod: &Pod) -> i64 {
    let period = i64::try_from(group.period.as_secs()).unwrap_or(i64::MAX);
    let own = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    own.map_or(period, |own| own.min(period))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn pod(name: &str, priority: Option<i32>, grace: Option<i64>) -> Pod {
        let spec = json!({ "containers": [], "priority": priority, "terminationGracePeriodSeconds": grace });
        Arc::new(serde_json::from_value(json!({ "metadata": { "name": name }, "spec": spec })).expect("a pod"))
    }

    fn shown(groups: &[Group]) -> Vec<(i32, u64)> {
        groups.iter().map(|group| (group.priority, group.period.as_secs())).collect()
    }

    #[test]
    fn groups_of_the_configuration() {
        type Row<'a> = (u64, u64, &'a [(i32, i64)], &'a [(i32, u64)]);
        let table: [Row<'_>; 6] = [
            (0, 0, &[], &[]),
            (30, 10, &[], &[(0, 20), (CRITICAL, 10)]),
            (30, 0, &[], &[(0, 30), (CRITICAL, 0)]),
            (10, 30, &[], &[]),
            (0, 0, &[(100, 5), (0, 60), (CRITICAL, 10)], &[(0, 60), (100, 5), (CRITICAL, 10)]),
            (0, 0, &[(0, 0)], &[(0, 0)]),
        ];
        for (total, critical, by_priority, expected) in table {
            assert_eq!(shown(&groups(secs(total), secs(critical), by_priority)), expected, "{total} {critical}");
        }
    }

    #[test]
    fn periods_of_any_length_are_added_up() {
        let endless = groups(secs(0), secs(0), &[(0, i64::MAX), (1, i64::MAX), (2, i64::MAX)]);
        assert_eq!((endless.len(), needed(&endless)), (3, Duration::MAX));
    }

    #[test]
    fn pods_are_terminated_by_priority() {
        let groups = groups(secs(0), secs(0), &[(100, 5), (1000, 10), (CRITICAL, 20)]);
        let pods = vec![
            pod("critical", Some(CRITICAL + 1000), None),
            pod("below all", Some(-5), None),
            pod("none", None, None),
            pod("just", Some(1000), None),
            pod("almost", Some(999), None),
        ];
        let names: Vec<(i32, Vec<String>)> = order(&groups, pods)
            .into_iter()
            .map(|(group, pods)| (group.priority, pods.iter().filter_map(|pod| pod.metadata.name.clone()).collect()))
            .collect();
        let expected = [(100, vec!["below all", "none", "almost"]), (1000, vec!["just"]), (CRITICAL, vec!["critical"])];
        assert_eq!(names, expected.map(|(priority, names)| (priority, names.into_iter().map(str::to_owned).collect())));
    }

    #[test]
    fn grace_periods_are_limited_by_the_group() {
        let group = Group { priority: 0, period: secs(10) };
        let table = [(None, 10), (Some(3), 3), (Some(30), 10), (Some(0), 0)];
        for (own, expected) in table {
            assert_eq!(grace(&group, &pod("p", None, own)), expected, "{own:?}");
        }
    }

    proptest! {
        /// Every pod is in one group, and priorities increase from group to group.
        #[test]
        fn every_pod_is_in_one_group(
            levels in prop::collection::btree_map(-10_i32..10, 1_i64..100, 1..4), priorities in prop::collection::vec(-20_i32..20, 0..20),
        ) {
            let groups = groups(secs(0), secs(0), &levels.into_iter().collect::<Vec<_>>());
            let pods: Vec<Pod> = priorities.iter().map(|priority| pod("p", Some(*priority), None)).collect();
            let ordered = order(&groups, pods);
            let all: Vec<i32> = ordered.iter().flat_map(|(_, pods)| pods).filter_map(|p| p.spec.as_ref()?.priority).collect();
            prop_assert_eq!(all.len(), priorities.len());
            for pair in ordered.windows(2) {
                let most = pair[0].1.iter().filter_map(|p| p.spec.as_ref()?.priority).max();
                let least = pair[1].1.iter().filter_map(|p| p.spec.as_ref()?.priority).min();
                prop_assert!(pair[0].0.priority < pair[1].0.priority && most < least);
            }
        }
    }
}
