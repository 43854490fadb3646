//! Exit codes that the runtime does not report yet. CRI-O reports an exit with code -1 until it has read what its monitor of
//! the container has written. No process has such a code: that of the kernel counts where it is known. Else the code is
//! held back for a while, in which the pod is inspected again: a restart policy would count it as a failure, and the final
//! phase of a pod never changes.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::Instant;

use super::task::PlegTask;
use crate::events::ExitFacts;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::Source;
use crate::oom::verdict::ordinary_reason;

/// How long a code is held back. Then the status has the runtime's, as a kubelet's has from the beginning, until an event
/// of the runtime has another one.
const CODE_LIMIT: Duration = Duration::from_secs(10);

/// The first report of an exit without its code.
#[derive(Clone, Copy)]
pub(super) struct CodelessExit {
    reported_at: Instant,
    /// The same in nanoseconds since the Unix epoch.
    wall_nanos: i64,
}

impl CodelessExit {
    /// How much longer the code is held back; `None` if it is no more.
    pub(super) fn remaining(&self) -> Option<Duration> {
        CODE_LIMIT.checked_sub(self.reported_at.elapsed()).filter(|left| !left.is_zero())
    }
}

/// True if the runtime reports this code in place of one that it does not have yet (CRI-O's -1).
pub(super) fn is_placeholder(code: i32) -> bool {
    code < 0
}

/// The runtime has reported the exit, but not its code.
pub(super) fn lacks_code(container: &ContainerStatus) -> bool {
    let is_reported = container.state == ContainerState::Exited && container.proven.is_none();
    is_reported && container.exit_code.is_none_or(is_placeholder)
}

/// The runtime has reported the exit, and is queried for its code.
pub(super) fn is_held_back(container: &ContainerStatus) -> bool {
    lacks_code(container) && container.exit_code.is_none()
}

/// The exit has a status with a code, be it a placeholder.
fn has_code(container: &ContainerStatus) -> bool {
    container.state == ContainerState::Exited && container.exit_code.is_some()
}

/// The exit is so long ago that its code is not held back. Not known without its time.
fn is_past_limit(finished_at: i64, wall_nanos: i64) -> bool {
    let age = u64::try_from(wall_nanos.saturating_sub(finished_at)).map_or(Duration::ZERO, Duration::from_nanos);
    finished_at > 0 && age >= CODE_LIMIT
}

impl PlegTask {
    /// Adds the code and the time that the kernel reports of an exit to a status without. `before` is the container in the
    /// snapshot before. `leads_namespace`: its init process is that of a PID namespace.
    pub(super) fn add_exit_code(
        &self,
        container: &mut ContainerStatus,
        before: Option<&ContainerStatus>,
        leads_namespace: bool,
    ) {
        if !lacks_code(container) {
            return;
        }
        let facts = match container.pid {
            Some(_) => self.exits.get(container),
            // Else the record may be that of a child.
            None if leads_namespace => self.exits.only_of(&container.id),
            None => None,
        };
        let wall_nanos = |facts: &ExitFacts| self.config.clock.wall_nanos_before(facts.at.age(Instant::now()));
        let recorded = facts.map(|facts| (facts.exit_code, wall_nanos(facts)));
        let proven = before.filter(|before| before.proven.is_some());
        let proven = proven.and_then(|before| Some((before.exit_code?, before.finished_at)));
        let Some((code, finished_at)) = recorded.or(proven) else { return };
        set_code(container, code);
        if container.finished_at <= 0 {
            container.finished_at = finished_at;
        }
    }

    /// Adds the code that a pidfd has reported after the runtime had reported the exit without. `known` is the cached
    /// snapshot.
    pub(super) fn publish_code(&mut self, uid: &PodUid, known: &PodSnapshot, id: &ContainerId, code: i32) {
        let mut snapshot = known.clone();
        for container in snapshot.containers.iter_mut().filter(|container| &container.id == id) {
            set_code(container, code);
        }
        self.correct_reasons(known, &mut snapshot);
        self.publish(uid, snapshot, Source::Kernel);
    }

    /// Holds back codes that the runtime does not report yet. `known`: the snapshot before. Without one, the agent has just
    /// started: an exit that is older than the limit has been reported with the code it has, or would be by now; an agent
    /// that was killed may have held back a later one. True if the pod is to be inspected for them again.
    pub(super) fn hold_back_codes(
        &mut self,
        uid: &PodUid,
        known: Option<&PodSnapshot>,
        snapshot: &mut PodSnapshot,
    ) -> bool {
        let Some(record) = self.records.get_mut(uid) else { return false };
        let wall_nanos = self.config.clock.wall_nanos();
        let lacking = snapshot.containers.iter().filter(|container| lacks_code(container));
        let lacking: HashSet<ContainerId> = lacking.map(|container| container.id.clone()).collect();
        record.codeless_exits.retain(|id, _| lacking.contains(id));
        let known = known.map(PodSnapshot::containers_by_id);
        let mut are_held_back = false;
        for container in snapshot.containers.iter_mut().filter(|container| lacks_code(container)) {
            let is_final = match &known {
                Some(known) => known.get(&container.id).is_some_and(|before| has_code(before)),
                None => is_past_limit(container.finished_at, wall_nanos),
            };
            if is_final {
                continue;
            }
            let now = CodelessExit { reported_at: Instant::now(), wall_nanos };
            let first = record.codeless_exits.entry(container.id.clone()).or_insert(now);
            if container.finished_at <= 0 {
                container.finished_at = first.wall_nanos;
            }
            if first.remaining().is_some() {
                container.exit_code = None;
                are_held_back = true;
            }
        }
        are_held_back
    }
}

/// Sets the code that the runtime did not know, with the reason and the message that it gives with it: those it gave were for
/// an error.
fn set_code(container: &mut ContainerStatus, code: i32) {
    container.exit_code = Some(code);
    let before_log = container.termination.before_log.take();
    if code != 0 {
        return;
    }
    if container.reason == "Error" {
        ordinary_reason(code).clone_into(&mut container.reason);
    }
    if let Some(message) = before_log {
        container.message = message;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ProvenExit;
    use crate::pleg::testing::container;

    #[test]
    fn an_exit_without_a_time_or_in_the_future_may_be_a_late_one() {
        let (now, second) = (1_000_000_000_000, 1_000_000_000);
        for (finished_at, is_past) in [
            (now - 10 * second, true),
            (now - 10 * second + 1, false),
            (now + 3600 * second, false),
            (0, false),
            (i64::MIN, false),
        ] {
            assert_eq!(is_past_limit(finished_at, now), is_past, "{finished_at}");
        }
    }

    #[test]
    fn a_code_is_missing_only_if_the_runtime_has_reported_the_exit_without() {
        let exited = |exit_code| ContainerStatus { exit_code, ..container("a", "web", ContainerState::Exited) };
        for (code, lacks, held_back) in [(None, true, true), (Some(-1), true, false), (Some(0), false, false)] {
            assert_eq!((lacks_code(&exited(code)), is_held_back(&exited(code))), (lacks, held_back), "{code:?}");
        }
        assert!(!lacks_code(&container("a", "web", ContainerState::Running)));
        assert!(!lacks_code(&container("a", "web", ContainerState::Created)));
        let proven = ProvenExit { seen_at: Instant::now(), kernel_age: None, exit_code: None, oom_killed: false };
        assert!(!lacks_code(&ContainerStatus { proven: Some(proven), ..exited(None) }), "not reported yet");
    }
}
