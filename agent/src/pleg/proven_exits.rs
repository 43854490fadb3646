//! Applies exits that the kernel proved to snapshots in which the runtime does not report them yet. Pure.
//!
//! An exit is applied to every later snapshot with the container running until the runtime confirms it, or until the
//! contradiction has lasted longer than [`CONTRADICTION`]; then the runtime wins.

use std::collections::HashMap;
use std::time::Duration;

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
    /// Some exits are not confirmed yet.
    pub pending: bool,
}

/// Applies `exits` to `snapshot`. `finished_at` returns the wall-clock time of a container's exit in nanoseconds.
pub(super) fn overlay_exits(
    snapshot: &mut PodSnapshot,
    exits: &HashMap<ContainerId, ProvenExit>,
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
        } else if snapshot.sampled_at > exit.seen_at + CONTRADICTION {
            overlay.contradicted.push(id.clone());
        } else {
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
    use tokio::time::Instant;

    use super::*;
    use crate::pleg::testing::container;
    use crate::pleg::testing::snapshot;

    fn exit(at: Instant) -> ProvenExit {
        ProvenExit { seen_at: at, kernel_age: None, exit_code: Some(3), oom_killed: false }
    }

    #[test]
    fn an_exit_is_applied_until_the_runtime_confirms_it() {
        let now = Instant::now();
        let exits = HashMap::from([(ContainerId::from("a"), exit(now))]);

        let mut stale = snapshot(now, vec![container("a", "web", ContainerState::Running)]);
        let overlay = overlay_exits(&mut stale, &exits, |_, _| 99);
        assert!(overlay.pending && overlay.settled.is_empty());
        assert_eq!(stale.containers[0].state, ContainerState::Exited);
        assert_eq!((stale.containers[0].exit_code, stale.containers[0].finished_at), (Some(3), 99));

        let mut confirmed = snapshot(now, vec![container("a", "web", ContainerState::Exited)]);
        assert_eq!(overlay_exits(&mut confirmed, &exits, |_, _| 99).settled, vec![ContainerId::from("a")]);
        assert!(confirmed.containers[0].proven.is_none());
    }

    #[test]
    fn a_long_contradiction_is_decided_for_the_runtime() {
        let now = Instant::now();
        let exits = HashMap::from([(ContainerId::from("a"), exit(now))]);
        let later = now + CONTRADICTION + Duration::from_millis(1);
        let mut late = snapshot(later, vec![container("a", "web", ContainerState::Running)]);
        let overlay = overlay_exits(&mut late, &exits, |_, _| 99);
        assert_eq!(overlay.contradicted, vec![ContainerId::from("a")]);
        assert_eq!(late.containers[0].state, ContainerState::Running);
    }
}
