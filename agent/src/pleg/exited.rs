//! Exits contained in events of the runtime. An exited container never runs again, so its final status is put into the
//! cached snapshot without an inspection. Everything else in an event is a hint.

use std::time::Duration;

use keblet_proto::cri::v1;

use super::exit_code::lacks_code;
use super::task::CallResult;
use super::task::PlegTask;
use super::termination::MessageSource;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::Source;

/// An event describes one container; the pod is inspected after this delay in case others changed, unless its worker has
/// inspected it by then.
const VERIFY: Duration = Duration::from_secs(1);

impl PlegTask {
    /// The cached container is running, or exited without confirmation by the runtime, or without a code that the runtime
    /// knows.
    pub(super) fn runs(&self, uid: &PodUid, id: &str) -> bool {
        let snapshot = self.records.get(uid).and_then(|record| record.snapshot.as_ref());
        let container = snapshot.and_then(|s| s.containers.iter().find(|c| c.id.as_str() == id));
        container.is_some_and(|c| c.state == ContainerState::Running || c.proven.is_some() || lacks_code(c))
    }

    /// Reads the termination message of an exit in a task of its own.
    pub(super) fn take_exit(&mut self, uid: PodUid, status: v1::ContainerStatus) {
        let snapshot = self.records.get(&uid).and_then(|record| record.snapshot.as_ref());
        let known = snapshot.and_then(|s| s.containers.iter().find(|c| c.id.as_str() == status.id));
        let Some(mut container) = known.cloned().map(Box::new) else { return };
        container.state = ContainerState::Exited;
        container.exit_code = Some(status.exit_code);
        container.finished_at = status.finished_at;
        container.reason = status.reason;
        container.message = status.message;
        container.proven = None;
        let messages = self.messages.clone();
        self.work.spawn(async move {
            messages.append(&uid, &mut container, MessageSource::FileOrLog).await;
            CallResult::Exited { uid, container }
        });
    }

    /// Puts the exit into the cached snapshot, unless a later inspection has superseded it.
    pub(super) fn on_exited(&mut self, uid: &PodUid, container: ContainerStatus) {
        if !self.runs(uid, container.id.as_str()) {
            return;
        }
        let Some(record) = self.records.get_mut(uid) else { return };
        record.proven_exits.remove(&container.id);
        record.rechecks = 0;
        let Some(known) = record.snapshot.clone() else { return };
        let mut snapshot = PodSnapshot::clone(&known);
        if let Some(place) = snapshot.containers.iter_mut().find(|c| c.id == container.id) {
            *place = container;
        }
        self.correct_reasons(&known, &mut snapshot);
        add_exit_times(Some(&known), &mut snapshot, self.config.clock.wall_nanos());
        if let Some(record) = self.records.get_mut(uid) {
            record.settle_now();
        }
        self.publish(uid, snapshot, Source::Runtime);
        self.recheck_later(uid, VERIFY);
    }
}

/// An inspection that began before an exit event may still contain "running": exited containers stay exited. An exit
/// without its code is not from an event.
pub(super) fn keep_exits(known: &PodSnapshot, snapshot: &mut PodSnapshot) {
    let is_final = |c: &ContainerStatus| c.state == ContainerState::Exited && c.proven.is_none() && !lacks_code(c);
    let known = known.containers_by_id();
    for container in &mut snapshot.containers {
        if let Some(before) = known.get(&container.id).filter(|before| is_final(before)) {
            container.clone_from(before);
        }
    }
}

/// Adds times to exits that the runtime reports without one: crash-loop back-off is counted from them. An exit gets the time
/// at which it was first seen. `known` is the snapshot before. Without one, the exit was before the first inspection of the
/// pod, and gets the time at which its container was started.
pub(super) fn add_exit_times(known: Option<&PodSnapshot>, snapshot: &mut PodSnapshot, wall_nanos: i64) {
    let known = known.map(PodSnapshot::containers_by_id);
    for container in &mut snapshot.containers {
        if container.state != ContainerState::Exited || container.finished_at > 0 {
            continue;
        }
        let before = known.as_ref().and_then(|known| known.get(&container.id)).map(|before| before.finished_at);
        container.finished_at = match before.filter(|at| *at > 0) {
            Some(at) => at,
            None if known.is_some() => wall_nanos,
            None => container.started_at.max(container.created_at),
        };
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::pleg::testing::container;
    use crate::pleg::testing::snapshot;

    #[test]
    fn an_exit_is_not_reverted_by_an_older_inspection() {
        let now = Instant::now();
        let known = snapshot(now, vec![container("a", "web", ContainerState::Exited)]);
        let running = |id: &str| container(id, "web", ContainerState::Running);
        let mut late = snapshot(now, vec![running("b"), running("a")]);
        keep_exits(&known, &mut late);
        assert_eq!(late.containers[1].state, ContainerState::Exited);
        assert_eq!(late.containers[0].state, ContainerState::Running, "another instance is not affected");
    }

    #[test]
    fn a_code_replaces_one_that_the_runtime_did_not_know() {
        let now = Instant::now();
        let exited = |exit_code| ContainerStatus { exit_code, ..container("a", "web", ContainerState::Exited) };
        for (before, after, kept) in [(Some(-1), 3, 3), (None, 3, 3), (Some(0), -1, 0)] {
            let mut later = snapshot(now, vec![exited(Some(after))]);
            keep_exits(&snapshot(now, vec![exited(before)]), &mut later);
            assert_eq!(later.containers[0].exit_code, Some(kept), "{after} after {before:?}");
        }
    }

    #[test]
    fn an_exit_without_a_time_has_that_at_which_it_was_seen() {
        let now = Instant::now();
        let at = |state, finished_at| ContainerStatus { finished_at, ..container("a", "web", state) };
        let running = at(ContainerState::Running, 0);
        for reported in [0, i64::MIN] {
            let exited = at(ContainerState::Exited, reported);
            let seen = |known: Option<&PodSnapshot>, container: &ContainerStatus, wall_nanos| {
                let mut snapshot = snapshot(now, vec![container.clone()]);
                add_exit_times(known, &mut snapshot, wall_nanos);
                snapshot
            };
            let first = seen(Some(&snapshot(now, vec![running.clone()])), &exited, 50);
            assert_eq!(first.containers[0].finished_at, 50);
            assert_eq!(seen(Some(&first), &exited, 60).containers[0].finished_at, 50, "as it was first seen");
            assert_eq!(seen(Some(&snapshot(now, vec![])), &exited, 50).containers[0].finished_at, 50, "a new one");
            assert_eq!(seen(None, &exited, 50).containers[0].finished_at, 2, "before the agent was started");
        }
        let table = [(at(ContainerState::Exited, 7), 7), (running, 0)];
        for (reported, kept) in table {
            let mut snapshot = snapshot(now, vec![reported]);
            add_exit_times(None, &mut snapshot, 50);
            assert_eq!(snapshot.containers[0].finished_at, kept);
        }
    }
}
