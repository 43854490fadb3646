//! State of one pod in the PLEG, and when another inspection is due.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::time::delay_queue;

use super::exit_code::CodelessExit;
use super::handle::Reply;
use super::proof::ExitHint;
use crate::events::Expect;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::PodSnapshot;
use crate::model::ProvenExit;
use crate::model::Source;
use crate::model::backoff_delay;

/// Hints kept per pod; beyond that they are replaced by one inspection.
const HINTS_PER_POD: usize = 32;

/// Hints cause an inspection if the worker acts for longer than this.
pub(super) const ACTING_LIMIT: Duration = Duration::from_secs(1);
/// The same for hints of starts alone: the worker starts containers itself, and on a busy node that takes longer.
const STARTING_LIMIT: Duration = Duration::from_secs(10);

/// The longest pause between inspections of a pod.
const LONGEST_DELAY: Duration = Duration::from_secs(10);

/// A hint that no snapshot has answered yet.
#[derive(Clone, Debug)]
pub(super) struct PendingHint {
    pub id: ContainerId,
    pub expect: Expect,
    pub at: Instant,
}

/// A caller that waits for a snapshot sampled at or after `since`.
pub(super) struct Waiter {
    pub since: Instant,
    pub reply: Reply,
}

/// State of one pod. Only the task changes it.
#[derive(Default)]
pub(super) struct PodRecord {
    pub snapshot: Option<Arc<PodSnapshot>>,
    /// Exits that the kernel proved and the runtime has not confirmed.
    pub proven_exits: HashMap<ContainerId, ProvenExit>,
    /// Since when the runtime has answered that the containers of some of them run.
    pub denied_since: HashMap<ContainerId, Instant>,
    /// Containers whose init is watched, or cannot be.
    pub pins: HashSet<ContainerId>,
    /// Containers that may have exited without proof: the runtime has yet to report it.
    pub exit_hints: HashMap<ContainerId, ExitHint>,
    /// Containers whose exit the runtime has reported without its code.
    pub codeless_exits: HashMap<ContainerId, CodelessExit>,
    /// Sample time of the inspection in progress.
    pub inflight: Option<Instant>,
    /// Another inspection is due when it ends.
    pub again: Option<Instant>,
    pub waiters: Vec<Waiter>,
    /// Callers that wait for the exit of one container.
    pub exit_waiters: Vec<(ContainerId, oneshot::Sender<()>)>,
    /// Containers that the worker has just started: the next inspection needs their statuses.
    pub fresh: Vec<ContainerId>,
    /// Sandboxes without the pod's UID as a label, as of the last relist: inspections list them by their ids.
    pub unlabelled: Vec<String>,
    pub hints: Vec<PendingHint>,
    /// The worker has been acting since then; its own inspection will follow.
    pub acting_since: Option<Instant>,
    /// The sensor that caused the inspection.
    pub source: Option<Source>,
    pub recheck: Option<delay_queue::Key>,
    pub rechecks: u32,
    pub failures: u32,
    /// Why the last inspection failed, which was logged; empty if it did not.
    pub failed: String,
}

impl PodRecord {
    /// Adds a hint. Too many are replaced by one inspection.
    pub(super) fn hint(&mut self, hint: PendingHint) {
        if self.hints.len() >= HINTS_PER_POD {
            self.hints.clear();
            self.again = Some(hint.at);
        } else {
            self.hints.push(hint);
        }
    }

    /// Drops hints that a snapshot sampled at `sampled_at` has answered.
    pub(super) fn settle(&mut self, sampled_at: Instant) {
        let snapshot = self.snapshot.clone();
        self.hints.retain(|hint| hint.at > sampled_at && !satisfied(hint, snapshot.as_deref()));
        self.again = self.again.filter(|at| *at > sampled_at);
    }

    /// Drops hints that the present snapshot already answers.
    pub(super) fn settle_now(&mut self) {
        let snapshot = self.snapshot.clone();
        self.hints.retain(|hint| !satisfied(hint, snapshot.as_deref()));
    }

    /// True if an inspection should start now. After a failed one, hints wait for the retry; callers do not.
    pub(super) fn wants_inspection(&self) -> bool {
        let retrying = self.failures > 0 && self.recheck.is_some();
        let reason_to_inspect = self.again.is_some() || !self.hints.is_empty();
        self.inflight.is_none()
            && (!self.waiters.is_empty() || (self.acting_since.is_none() && !retrying && reason_to_inspect))
    }

    /// How long hints may wait for an acting worker; `None` if there are none.
    pub(super) fn hint_timeout(&self) -> Option<Duration> {
        let starts_only = self.hints.iter().all(|hint| hint.expect == Expect::Started);
        (!self.hints.is_empty()).then_some(if starts_only { STARTING_LIMIT } else { ACTING_LIMIT })
    }

    /// Answers the callers whose container has exited as of the present snapshot, and drops those that were cancelled.
    pub(super) fn answer_exits(&mut self) {
        let Some(snapshot) = self.snapshot.as_ref().filter(|_| !self.exit_waiters.is_empty()) else { return };
        let containers = snapshot.containers_by_id();
        let has_exited =
            |id: &ContainerId| containers.get(id).is_some_and(|found| found.state == ContainerState::Exited);
        for (_, exited) in self.exit_waiters.extract_if(.., |(id, exited)| exited.is_closed() || has_exited(id)) {
            // Fails if the caller was cancelled.
            let _ = exited.send(());
        }
    }

    /// Whether the init process of each running container is watched, as far as it is known.
    pub(super) fn watches_all(&self) -> bool {
        let Some(snapshot) = &self.snapshot else { return true };
        snapshot.running().all(|container| container.pid.is_none() || self.pins.contains(&container.id))
    }

    /// True if the record holds nothing and can be removed.
    pub(super) fn is_vacant(&self) -> bool {
        self.snapshot.is_none() && self.inflight.is_none() && self.waiters.is_empty() && self.acting_since.is_none()
    }
}

/// True if the snapshot already contains what the hint announced.
fn satisfied(hint: &PendingHint, snapshot: Option<&PodSnapshot>) -> bool {
    let Some(snapshot) = snapshot else { return hint.expect == Expect::Deleted };
    if let Some(container) = snapshot.by_id(&hint.id) {
        return match hint.expect {
            Expect::Started => matches!(container.state, ContainerState::Running | ContainerState::Exited),
            Expect::Stopped => container.state == ContainerState::Exited && container.proven.is_none(),
            Expect::Deleted => false,
        };
    }
    match snapshot.sandboxes.iter().find(|s| s.id.as_str() == hint.id.as_str()) {
        Some(sandbox) => match hint.expect {
            Expect::Started => true,
            Expect::Stopped => !sandbox.ready,
            Expect::Deleted => false,
        },
        None => hint.expect == Expect::Deleted,
    }
}

/// Delay before the next inspection of a pod with an exit that the runtime has not confirmed. With the event stream up,
/// the runtime's event normally comes first.
pub(super) fn recheck_delay(attempt: u32, events_up: bool) -> Duration {
    let first = if events_up { Duration::from_secs(1) } else { Duration::from_millis(50) };
    backoff_delay(first, LONGEST_DELAY, attempt.saturating_add(1))
}

/// Delay after a failed inspection.
pub(super) fn retry_delay(failures: u32) -> Duration {
    backoff_delay(Duration::from_millis(200), LONGEST_DELAY, failures.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use keblet_proto::cri::v1;

    use super::*;
    use crate::pleg::convert;
    use crate::pleg::testing::container;
    use crate::pleg::testing::snapshot;

    fn record(state: ContainerState, now: Instant) -> PodRecord {
        let snapshot = snapshot(now, vec![container("a", "web", state)]);
        PodRecord { snapshot: Some(Arc::new(snapshot)), ..Default::default() }
    }

    fn hint(expect: Expect, at: Instant) -> PendingHint {
        PendingHint { id: ContainerId::from("a"), expect, at }
    }

    #[tokio::test]
    async fn a_hint_is_answered_by_a_later_sample_or_the_announced_state() {
        let now = Instant::now();
        let later = now + Duration::from_millis(5);
        let mut stale = record(ContainerState::Running, now);
        stale.hint(hint(Expect::Stopped, later));
        stale.settle(now);
        assert!(stale.wants_inspection(), "sampled before the hint and not stopped: inspect again");
        stale.settle(later + Duration::from_millis(1));
        assert!(!stale.wants_inspection(), "sampled after the hint: the inspection counts");

        let mut early = record(ContainerState::Running, now);
        early.hint(hint(Expect::Started, later));
        early.settle(now);
        assert!(!early.wants_inspection(), "already seen running");
    }

    #[tokio::test]
    async fn a_hint_is_answered_by_what_it_announces_as_the_runtime_reports_it() {
        let now = Instant::now();
        let answered = |known: PodRecord, id: &str| {
            [Expect::Started, Expect::Stopped, Expect::Deleted].map(|expect| {
                let mut record = PodRecord { snapshot: known.snapshot.clone(), ..Default::default() };
                record.hint(PendingHint { id: ContainerId::from(id), expect, at: now });
                record.settle_now();
                record.hints.is_empty()
            })
        };
        for (state, expected) in [
            (ContainerState::Created, [false, false, false]),
            (ContainerState::Running, [true, false, false]),
            (ContainerState::Exited, [true, true, false]),
            (ContainerState::Unknown, [false, false, false]),
        ] {
            assert_eq!(answered(record(state, now), "a"), expected, "{state:?}");
        }
        assert_eq!(answered(record(ContainerState::Running, now), "gone"), [false, false, true]);
        assert_eq!(answered(PodRecord::default(), "a"), [false, false, true], "nothing is known of the pod");
        let with = |change: fn(&mut PodSnapshot)| {
            let mut snapshot = snapshot(now, vec![container("a", "web", ContainerState::Exited)]);
            change(&mut snapshot);
            PodRecord { snapshot: Some(Arc::new(snapshot)), ..Default::default() }
        };
        let proven = with(|snapshot| {
            let seen_at = snapshot.sampled_at;
            let proof = ProvenExit { seen_at, kernel_age: None, exit_code: None, oom_killed: false };
            snapshot.containers[0].proven = Some(proof);
        });
        assert_eq!(answered(proven, "a"), [true, false, false], "the runtime has not reported the exit");
        let sandbox = |snapshot: &mut PodSnapshot| {
            let status = convert::sandbox(v1::PodSandboxStatus { id: "s".into(), ..Default::default() }, "");
            snapshot.sandboxes.push(status);
        };
        assert_eq!(answered(with(sandbox), "s"), [true, false, false], "it is ready");
        let ended = with(|snapshot| {
            let state = v1::PodSandboxState::SandboxNotready as i32;
            let status = v1::PodSandboxStatus { id: "s".into(), state, ..Default::default() };
            snapshot.sandboxes.push(convert::sandbox(status, ""));
        });
        assert_eq!(answered(ended, "s"), [true, true, false]);
    }

    #[tokio::test]
    async fn hints_wait_for_an_acting_worker_but_waiters_do_not() {
        let now = Instant::now();
        let mut record = record(ContainerState::Running, now);
        record.acting_since = Some(now);
        record.hint(hint(Expect::Stopped, now));
        assert!(!record.wants_inspection());
        let (reply, _answer) = tokio::sync::oneshot::channel();
        record.waiters.push(Waiter { since: now, reply });
        assert!(record.wants_inspection());
    }

    #[tokio::test]
    async fn hints_of_starts_wait_longer_for_the_worker() {
        let now = Instant::now();
        let mut record = record(ContainerState::Running, now);
        assert_eq!(record.hint_timeout(), None);
        let later = now + Duration::from_millis(1);
        record.hint(PendingHint { id: ContainerId::from("b"), expect: Expect::Started, at: later });
        assert_eq!(record.hint_timeout(), Some(STARTING_LIMIT));
        record.hint(hint(Expect::Stopped, later));
        assert_eq!(record.hint_timeout(), Some(ACTING_LIMIT), "the shortest timeout counts");
    }

    #[tokio::test]
    async fn too_many_hints_become_one_inspection() {
        let now = Instant::now();
        let mut record = record(ContainerState::Running, now);
        for n in 0..1000 {
            record.hint(PendingHint { id: ContainerId::from(n.to_string()), expect: Expect::Stopped, at: now });
        }
        assert!(record.hints.len() <= HINTS_PER_POD && record.wants_inspection());
    }

    #[test]
    fn rechecks_back_off_and_are_capped() {
        assert_eq!(recheck_delay(0, false), Duration::from_millis(50));
        assert_eq!(recheck_delay(0, true), Duration::from_secs(1));
        assert_eq!(recheck_delay(40, true), Duration::from_secs(10));
        assert_eq!(retry_delay(0), Duration::from_millis(200));
    }
}
