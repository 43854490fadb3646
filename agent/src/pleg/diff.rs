//! Lifecycle events between two snapshots, by the table of the generic PLEG (`computeEvents` of the kubelet). Pure.

use std::collections::HashMap;
use std::collections::HashSet;

use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::LifecycleKind;
use crate::model::PodSnapshot;

/// A change of one container or sandbox between two snapshots.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Change {
    /// The instance (a sandbox counts as a container).
    pub id: ContainerId,
    /// Name in the spec; empty for sandboxes.
    pub name: String,
    /// The event.
    pub kind: LifecycleKind,
    /// Exit code, if the new snapshot contains it.
    pub exit_code: Option<i32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PlegState {
    Running,
    Exited,
    Unknown,
    Absent,
}

impl From<ContainerState> for PlegState {
    fn from(state: ContainerState) -> Self {
        match state {
            ContainerState::Running => Self::Running,
            ContainerState::Exited => Self::Exited,
            ContainerState::Created | ContainerState::Unknown => Self::Unknown,
        }
    }
}

struct Item {
    id: ContainerId,
    name: String,
    seen: PlegState,
    exit_code: Option<i32>,
}

fn items(snapshot: &PodSnapshot) -> Vec<Item> {
    let containers = snapshot.containers.iter().map(|c| Item {
        id: c.id.clone(),
        name: c.name.clone(),
        seen: c.state.into(),
        exit_code: c.exit_code,
    });
    let sandboxes = snapshot.sandboxes.iter().map(|s| Item {
        id: ContainerId::from(s.id.as_str()),
        name: String::new(),
        seen: if s.ready { PlegState::Running } else { PlegState::Exited },
        exit_code: None,
    });
    containers.chain(sandboxes).collect()
}

/// Lifecycle events between two snapshots of the same pod, old items first. `None` means the pod was not known. All pods
/// wait for the result, and a pod may have thousands of containers.
pub(super) fn diff(old: Option<&PodSnapshot>, new: Option<&PodSnapshot>) -> Vec<Change> {
    let old = old.map(items).unwrap_or_default();
    let new = new.map(items).unwrap_or_default();
    let known: HashSet<&ContainerId> = old.iter().map(|item| &item.id).collect();
    let present: HashMap<&ContainerId, &Item> = new.iter().map(|item| (&item.id, item)).collect();
    let mut changes = Vec::new();
    for before in &old {
        match present.get(&before.id) {
            Some(now) => push(&mut changes, now, before.seen, now.seen),
            None => push(&mut changes, before, before.seen, PlegState::Absent),
        }
    }
    for now in new.iter().filter(|item| !known.contains(&item.id)) {
        push(&mut changes, now, PlegState::Absent, now.seen);
    }
    changes
}

/// True if `new` contains the exit code of a container that had exited in `old` with an unknown code.
pub(super) fn adds_exit_code(old: Option<&PodSnapshot>, new: Option<&PodSnapshot>) -> bool {
    let (Some(old), Some(new)) = (old, new) else { return false };
    let undecided = old.containers.iter().filter(|c| c.state == ContainerState::Exited && c.exit_code.is_none());
    let undecided: HashSet<&ContainerId> = undecided.map(|c| &c.id).collect();
    new.containers.iter().any(|c| c.exit_code.is_some() && undecided.contains(&c.id))
}

fn push(changes: &mut Vec<Change>, item: &Item, old: PlegState, new: PlegState) {
    for kind in kinds(old, new) {
        changes.push(Change {
            id: item.id.clone(),
            name: item.name.clone(),
            kind: *kind,
            exit_code: if *kind == LifecycleKind::ContainerDied { item.exit_code } else { None },
        });
    }
}

fn kinds(old: PlegState, new: PlegState) -> &'static [LifecycleKind] {
    use LifecycleKind::ContainerChanged;
    use LifecycleKind::ContainerDied;
    use LifecycleKind::ContainerRemoved;
    use LifecycleKind::ContainerStarted;
    match (old, new) {
        (a, b) if a == b => &[],
        (_, PlegState::Running) => &[ContainerStarted],
        (_, PlegState::Exited) => &[ContainerDied],
        (_, PlegState::Unknown) => &[ContainerChanged],
        (PlegState::Exited, PlegState::Absent) => &[ContainerRemoved],
        (_, PlegState::Absent) => &[ContainerDied, ContainerRemoved],
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::LifecycleKind::*;
    use super::*;
    use crate::model::ContainerStatus;
    use crate::pleg::testing::container;
    use crate::pleg::testing::snapshot;

    #[test]
    fn follows_the_table_of_the_generic_pleg() {
        use PlegState::*;
        let table: [(PlegState, [&[LifecycleKind]; 4]); 4] = [
            (Running, [&[], &[ContainerDied], &[ContainerChanged], &[ContainerDied, ContainerRemoved]]),
            (Exited, [&[ContainerStarted], &[], &[ContainerChanged], &[ContainerRemoved]]),
            (Unknown, [&[ContainerStarted], &[ContainerDied], &[], &[ContainerDied, ContainerRemoved]]),
            (Absent, [&[ContainerStarted], &[ContainerDied], &[ContainerChanged], &[]]),
        ];
        for (old, row) in table {
            for (new, expected) in [Running, Exited, Unknown, Absent].into_iter().zip(row) {
                assert_eq!(kinds(old, new), expected);
            }
        }
    }

    /// Looking for each among all others would take a minute.
    #[test]
    fn a_pod_may_have_any_number_of_containers() {
        const COUNT: usize = 50_000;
        let of = |state, first: usize| {
            let numbers = first..first + COUNT;
            let containers = numbers.map(|number| container(&format!("{number:064}"), "web", state));
            snapshot(Instant::now(), containers.collect())
        };
        let (old, new) = (of(ContainerState::Running, 0), of(ContainerState::Exited, 1));
        let began = std::time::Instant::now();
        let changes = diff(Some(&old), Some(&new));
        assert_eq!(changes.len(), COUNT + 2, "one died and was removed, one appeared");
        assert!(changes.iter().all(|change| change.kind != ContainerStarted));
        assert!(diff(Some(&new), Some(&new)).is_empty() && !adds_exit_code(Some(&new), Some(&new)));
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    }

    #[test]
    fn a_code_is_added_once() {
        let with_code = |exit_code| {
            let exited = container("a", "web", ContainerState::Exited);
            snapshot(Instant::now(), vec![ContainerStatus { exit_code, ..exited }])
        };
        let (unknown, known) = (with_code(None), with_code(Some(0)));
        assert!(adds_exit_code(Some(&unknown), Some(&known)));
        for (old, new) in [(&unknown, &unknown), (&known, &known), (&known, &unknown)] {
            assert!(!adds_exit_code(Some(old), Some(new)));
        }
        assert!(!adds_exit_code(None, Some(&known)));
    }
}
