//! Tests of the rules by which containers and sandboxes are removed.

use std::time::Duration;

use super::*;
use crate::model::testing;

fn instance(name: &str, attempt: u32, state: ContainerState) -> ContainerStatus {
    ContainerStatus { state, ..testing::exited(name, attempt, 0) }
}

/// A moment at which every instance is old.
const LATE: i64 = testing::T0 * 2;

fn policy(per_container: Option<usize>, min_age: u64) -> DeadContainerPolicy {
    DeadContainerPolicy { per_container, min_age: Duration::from_secs(min_age), ..DeadContainerPolicy::default() }
}

fn names(surplus: &Surplus<'_>) -> Vec<String> {
    surplus.now.iter().map(|status| format!("{}/{}", status.name, status.attempt)).collect()
}

/// What goes by this policy, when nothing exceeds the limits of the node and every instance is old.
fn gone(containers: &[ContainerStatus], policy: DeadContainerPolicy) -> Vec<String> {
    let snapshot = testing::snapshot(containers.to_vec());
    names(&surplus(&snapshot, &Rules { policy, excess: &HashSet::new(), now: LATE }))
}

#[test]
fn the_newest_exited_instances_of_each_container_stay() {
    use ContainerState::Created;
    use ContainerState::Exited;
    use ContainerState::Running;
    use ContainerState::Unknown;
    let newest_first = vec![
        instance("a", 4, Running),
        instance("b", 3, Created),
        instance("c", 3, Unknown),
        instance("a", 3, Created),
        instance("a", 2, Exited),
        instance("b", 2, Exited),
        instance("c", 2, Created),
        instance("a", 1, Exited),
        instance("b", 1, Unknown),
        instance("a", 0, Exited),
        instance("d", 0, Exited),
    ];
    for (limit, expected) in [
        (Some(1), &["a/0", "b/1", "a/1", "c/2", "a/3"][..]),
        (Some(2), &["a/0", "b/1", "c/2", "a/3"]),
        (Some(3), &["b/1", "c/2", "a/3"]),
        // What nothing depends on: a newer instance runs.
        (Some(0), &["a/0", "b/1", "a/1", "c/2", "a/2", "a/3"]),
        // One stays when another exits, and no more is removed.
        (None, &["a/0", "a/1"]),
    ] {
        assert_eq!(gone(&newest_first, policy(limit, 0)), expected, "{limit:?}");
    }
}

#[test]
fn an_unconfirmed_exit_does_not_count_as_the_newest() {
    let dead = |attempt| instance("a", attempt, ContainerState::Exited);
    let at = tokio::time::Instant::now();
    let proof = crate::model::ProvenExit { seen_at: at, kernel_age: None, exit_code: None, oom_killed: false };
    let newest = ContainerStatus { proven: Some(proof), ..dead(2) };
    let with = |older: &[u32]| [newest.clone()].into_iter().chain(older.iter().map(|at| dead(*at))).collect::<Vec<_>>();
    for (limit, older, expected) in
        [(1, &[1][..], &[][..]), (1, &[1, 0], &["a/0"]), (2, &[1, 0], &[]), (0, &[1, 0], &["a/0"])]
    {
        assert_eq!(gone(&with(older), policy(Some(limit), 0)), expected, "{limit} {older:?}");
    }
}

#[test]
fn with_a_limit_of_zero_the_last_instance_stays_until_another_runs() {
    use ContainerState::Created;
    use ContainerState::Exited;
    use ContainerState::Running;
    for (states, expected) in [
        (&[Exited][..], &[][..]),
        (&[Exited, Exited], &["a/0"]),
        (&[Created, Exited], &[]),
        (&[Running, Exited], &["a/0"]),
        (&[Running, Created, Exited], &["a/0", "a/1"]),
    ] {
        let attempts = (0..states.len() as u32).rev();
        let newest_first: Vec<_> =
            attempts.zip(states).map(|(attempt, state)| instance("a", attempt, *state)).collect();
        assert_eq!(gone(&newest_first, policy(Some(0), 0)), expected, "{states:?}");
    }
}

#[test]
fn young_instances_go_once_they_are_old_enough() {
    use ContainerState::Created;
    use ContainerState::Exited;
    use ContainerState::Running;
    // An attempt is created every 100 seconds.
    let pod = [(3, Running), (2, Created), (1, Exited), (0, Exited)];
    let snapshot = testing::snapshot(pod.map(|(attempt, state)| instance("a", attempt, state)).to_vec());
    for (limit, now, expected, next) in [
        (Some(0), 300, &["a/0"][..], Some(350)),
        (Some(0), 349, &["a/0"], Some(350)),
        (Some(0), 350, &["a/0", "a/1"], Some(450)),
        (Some(0), 450, &["a/0", "a/1", "a/2"], None),
        // What an exit has left over does not wait; what never ran does.
        (Some(1), 300, &["a/0"], Some(450)),
        (Some(1), 450, &["a/0", "a/2"], None),
        (Some(2), 450, &["a/2"], None),
        (None, 450, &["a/0"], None),
    ] {
        let rules = Rules { policy: policy(limit, 250), excess: &HashSet::new(), now: testing::at(now) };
        let found = surplus(&snapshot, &rules);
        assert_eq!(
            (names(&found), found.next),
            (expected.iter().map(ToString::to_string).collect(), next.map(testing::at)),
            "{limit:?} {now}"
        );
    }
}

#[test]
fn an_age_without_end_is_never_reached() {
    let snapshot = testing::snapshot(vec![testing::running("a", 1), instance("a", 0, ContainerState::Exited)]);
    let policy = DeadContainerPolicy { min_age: Duration::MAX, ..policy(Some(0), 0) };
    let found = surplus(&snapshot, &Rules { policy, excess: &HashSet::new(), now: LATE });
    assert_eq!((found.now.len(), found.next), (0, Some(i64::MAX)));
}

#[test]
fn without_a_least_age_the_clock_does_not_matter() {
    let snapshot = testing::snapshot(vec![testing::running("a", 1), instance("a", 0, ContainerState::Created)]);
    let rules = Rules { policy: policy(Some(1), 0), excess: &HashSet::new(), now: testing::at(-60) };
    assert_eq!(names(&surplus(&snapshot, &rules)), ["a/0"]);
}

#[test]
fn what_exceeds_the_limits_of_the_node_goes_unless_it_is_needed() {
    use ContainerState::Exited;
    let pod =
        vec![testing::running("a", 1), instance("b", 1, Exited), instance("a", 0, Exited), instance("b", 0, Exited)];
    let snapshot = testing::snapshot(pod);
    let excess: HashSet<ContainerId> = ["a-0", "b-0", "b-1"].map(Into::into).into();
    let rules = Rules { policy: policy(Some(2), 0), excess: &excess, now: LATE };
    assert_eq!(names(&surplus(&snapshot, &rules)), ["b/0", "a/0"]);
}

#[test]
fn what_has_not_exited_goes_without_its_sandbox_only_if_that_is_not_listed() {
    use ContainerState::Created;
    use ContainerState::Exited;
    use ContainerState::Running;
    use ContainerState::Unknown;
    let containers: Vec<_> =
        (0..).zip([Running, Created, Unknown, Exited]).map(|(attempt, state)| instance("a", attempt, state)).collect();
    let mut snapshot = testing::snapshot(containers);
    let gone = |snapshot: &PodSnapshot| dead(snapshot).map(|status| status.attempt).collect::<Vec<_>>();
    assert_eq!(gone(&snapshot), [3]);
    snapshot.sandboxes.clear();
    assert_eq!(gone(&snapshot), [1, 2, 3]);
}

#[test]
fn sandboxes_with_containers_stay() {
    let mut snapshot = testing::snapshot(vec![instance("a", 1, ContainerState::Exited)]);
    let sandbox = |id: &str, ready| crate::model::SandboxStatus {
        id: id.into(),
        ready,
        ..snapshot.sandboxes.first().expect("a sandbox").clone()
    };
    let sandboxes = ["newest", "ready", "full", "empty", "oldest"].map(|id| sandbox(id, id == "ready")).to_vec();
    snapshot.sandboxes = sandboxes;
    snapshot.containers[0].sandbox_id = "full".into();
    let ids = |gone: &[&ContainerId]| {
        let old = old_sandboxes(&snapshot, &gone.iter().copied().collect());
        old.into_iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(ids(&[]), ["oldest", "empty"]);
    assert_eq!(ids(&[&snapshot.containers[0].id]), ["oldest", "empty", "full"]);
}
