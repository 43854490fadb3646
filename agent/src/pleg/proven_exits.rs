//! Applies exits that the kernel proved to snapshots in which the runtime does not report them yet. Pure.
//!
//! An exit is applied to every later snapshot with the container running until the runtime confirms it, or until the
//! contradiction has lasted longer than [`CONTRADICTION`]; then the runtime wins. The contradiction begins with the
//! runtime's first answer after the exit: a runtime that answered nothing meanwhile may not have read the exit itself.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::PodSnapshot;
use crate::model::ProvenExit;

/// A runtime that still reports a container as running for so long contradicts the kernel. containerd needs about 45 ms
/// on an idle machine, and seconds on a busy one.
pub(super) const CONTRADICTION: Duration = Duration::from_secs(15);

/// Result of applying exits to a snapshot.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Overlay {
    /// Exits that the runtime has confirmed, or whose container was removed.
    pub settled: Vec<ContainerId>,
    /// Exits that the runtime has not confirmed within [`CONTRADICTION`].
    pub contradicted: Vec<ContainerId>,
    /// Exits that the runtime was asked about after they were seen, and has not confirmed.
    pub denied: Vec<ContainerId>,
    /// Some exits are not confirmed yet.
    pub pending: bool,
}

/// Applies `exits` to `snapshot`. `denied_since` has the time of the runtime's first answer that denied an exit.
/// `finished_at` returns the wall-clock time of a container's exit in nanoseconds.
pub(super) fn overlay_exits(
    snapshot: &mut PodSnapshot,
    exits: &HashMap<ContainerId, ProvenExit>,
    denied_since: &HashMap<ContainerId, Instant>,
    finished_at: impl Fn(&ContainerId, &ProvenExit) -> i64,
) -> Overlay {
    let mut overlay = Overlay::default();
    if exits.is_empty() {
        return overlay;
    }
    {
        let present = snapshot.containers_by_id();
        overlay.settled.extend(exits.keys().filter(|id| !present.contains_key(*id)).cloned());
    }
    for container in &mut snapshot.containers {
        let id = &container.id;
        let Some(exit) = exits.get(id) else { continue };
        if container.state == ContainerState::Exited && container.proven.is_none() {
            overlay.settled.push(id.clone());
        } else if denied_since.get(id).is_some_and(|since| snapshot.sampled_at > *since + CONTRADICTION) {
            overlay.contradicted.push(id.clone());
        } else {
            if container.proven.is_none() && snapshot.sampled_at > exit.seen_at {
                overlay.denied.push(id.clone());
            }
            container.state = ContainerState::Exited;
            container.exit_code = exit.exit_code;
            container.finished_at = finished_at(id, exit);
            container.proven = Some(*exit);
            overlay.pending = true;
        }
    }
    overlay
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pleg::testing::container;
    use crate::pleg::testing::snapshot;

    fn exit(at: Instant) -> ProvenExit {
        ProvenExit { seen_at: at, kernel_age: None, exit_code: Some(3), oom_killed: false }
    }

    /// [`overlay_exits`] of an exit of container `a` seen at `seen_at`.
    fn overlay(snapshot: &mut PodSnapshot, seen_at: Instant, denied_since: Option<Instant>) -> Overlay {
        let id = ContainerId::from("a");
        let denied = denied_since.map(|since| (id.clone(), since)).into_iter().collect();
        overlay_exits(snapshot, &HashMap::from([(id, exit(seen_at))]), &denied, |_, _| 99)
    }

    #[test]
    fn an_exit_is_applied_until_the_runtime_confirms_it() {
        let now = Instant::now();

        let mut stale = snapshot(now, vec![container("a", "web", ContainerState::Running)]);
        let applied = overlay(&mut stale, now, None);
        assert!(applied.pending && applied.settled.is_empty() && applied.denied.is_empty());
        assert_eq!(stale.containers[0].state, ContainerState::Exited);
        assert_eq!((stale.containers[0].exit_code, stale.containers[0].finished_at), (Some(3), 99));

        let mut confirmed = snapshot(now, vec![container("a", "web", ContainerState::Exited)]);
        assert_eq!(overlay(&mut confirmed, now, None).settled, vec![ContainerId::from("a")]);
        assert!(confirmed.containers[0].proven.is_none());

        let mut removed = snapshot(now, vec![container("b", "web", ContainerState::Running)]);
        let applied = overlay(&mut removed, now, None);
        assert_eq!((applied.settled, applied.pending), (vec![ContainerId::from("a")], false));
        assert_eq!(removed.containers[0].state, ContainerState::Running, "another instance runs");
    }

    #[test]
    fn a_long_contradiction_is_decided_for_the_runtime() {
        let now = Instant::now();
        let mut in_time = snapshot(now + CONTRADICTION, vec![container("a", "web", ContainerState::Running)]);
        let applied = overlay(&mut in_time, now, Some(now));
        assert_eq!((applied.contradicted, applied.pending), (Vec::new(), true));
        assert_eq!(in_time.containers[0].state, ContainerState::Exited);
        let later = now + CONTRADICTION + Duration::from_millis(1);
        let mut late = snapshot(later, vec![container("a", "web", ContainerState::Running)]);
        assert_eq!(overlay(&mut late, now, Some(now)).contradicted, vec![ContainerId::from("a")]);
        assert_eq!(late.containers[0].state, ContainerState::Running);
    }

    /// Naive: the time without answers counts, and the first answer of a runtime that hung is taken for its last word.
    #[test]
    fn a_contradiction_begins_with_the_first_answer() {
        let now = Instant::now();
        let later = now + CONTRADICTION + Duration::from_secs(2);
        let mut first = snapshot(later, vec![container("a", "web", ContainerState::Running)]);
        let applied = overlay(&mut first, now, None);
        assert_eq!((applied.contradicted, applied.denied), (Vec::new(), vec![ContainerId::from("a")]));
        assert_eq!(first.containers[0].state, ContainerState::Exited);
        assert!(overlay(&mut first, now, Some(later)).denied.is_empty(), "the cached snapshot is no further answer");
    }
}
