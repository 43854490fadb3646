//! What the syncing phase of a worker remembers between passes, and the pauses that follow from it.

use std::collections::HashMap;
use std::time::Duration;
use std::time::SystemTime;

use tokio::time::Instant;

use super::act::SyncOutcome;
use super::active_deadline::ActiveDeadline;
use super::volume_refresh::VolumeRefresh;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::PodActions;
use crate::model::PodSnapshot;
use crate::model::SandboxPlan;

/// Containers that exit at once would otherwise be restarted several times a second, each time with new files: no back-off
/// applies (KEP-5532). Upstream sees an exit with its next relist, once a second.
const RESTART_ALL_PERIOD: Duration = Duration::from_secs(1);

/// A sandbox that ends at once, or is reported without an address, would otherwise be replaced as fast as the runtime makes
/// another one: no back-off applies. Upstream sees its end with its next relist, once a second.
const SANDBOX_PERIOD: Duration = Duration::from_secs(1);

/// The cause of a failed start is shown at least for so long: a kubelet syncs the pod again after that.
const FAILURE_SHOWN: Duration = Duration::from_secs(10);

/// The event of a blocked start is repeated after this at the earliest.
const BACK_OFF_EVENT_PERIOD: Duration = Duration::from_secs(1);

/// State of the syncing phase between passes.
#[derive(Default)]
pub(super) struct SyncState {
    /// When the event of a container's crash-loop back-off was last sent, by name.
    event_sent: HashMap<String, Instant>,
    /// Since when back-off holds a container, by name, by a clock that is not set; until its next start.
    held: HashMap<String, Instant>,
    /// The last start of each container if it failed, by name.
    failed: HashMap<String, FailedStart>,
    /// When all containers were last removed to be restarted.
    restarted_all: Option<Instant>,
    /// When the plan that has last created a sandbox was executed.
    sandbox_created: Option<Instant>,
    /// Refresh state of the pod's volumes.
    pub volumes: VolumeRefresh,
    /// The end of the pod's `activeDeadlineSeconds`.
    pub deadline: ActiveDeadline,
}

/// A start that failed.
struct FailedStart {
    at: Instant,
    /// The instance that had exited last by then.
    exited: Option<ContainerId>,
}

impl SyncState {
    /// Keeps what a plan has done that was made from this snapshot.
    pub(super) fn executed(&mut self, snapshot: &PodSnapshot, outcome: &SyncOutcome) {
        self.remember_starts(snapshot, outcome);
        if outcome.restart_all_done {
            self.restarted_all = Some(Instant::now());
        }
        if outcome.sandbox == Some(true) {
            self.sandbox_created = Some(Instant::now());
        }
    }

    /// Keeps which starts failed.
    fn remember_starts(&mut self, snapshot: &PodSnapshot, outcome: &SyncOutcome) {
        let last_exited = last_exited(snapshot);
        for tried in &outcome.starts {
            self.held.remove(&tried.name);
            if tried.result.is_ok() {
                self.failed.remove(&tried.name);
            } else {
                let exited = last_exited.get(tried.name.as_str()).copied().cloned();
                self.failed.insert(tried.name.clone(), FailedStart { at: Instant::now(), exited });
            }
        }
    }

    /// For how long the status still shows why the last start of a container failed, instead of the back-off that holds the
    /// next one; `None` if it need not, or if an instance has exited since.
    pub(super) fn failure_shown_for(&self, last_exited: &LastExited<'_>, name: &str) -> Option<Duration> {
        let failed = self.failed.get(name)?;
        let left = FAILURE_SHOWN.saturating_sub(failed.at.elapsed());
        (!left.is_zero() && failed.exited.as_ref() == last_exited.get(name).copied()).then_some(left)
    }

    /// When the restart of all containers that is planned is due, if it is too early now.
    pub(super) fn restart_all_due(&self, actions: &PodActions) -> Option<Instant> {
        let due = self.restarted_all? + RESTART_ALL_PERIOD;
        (!actions.remove.is_empty() && due > Instant::now()).then_some(due)
    }

    /// When the creation of a sandbox that is planned is due, if it is too early now.
    pub(super) fn sandbox_due(&self, actions: &PodActions) -> Option<Instant> {
        let due = self.sandbox_created? + SANDBOX_PERIOD;
        let creates = matches!(actions.sandbox, SandboxPlan::Create { .. });
        (creates && due > Instant::now()).then_some(due)
    }

    /// Ends back-offs that have lasted long enough. The end in the plan is a time of the wall clock, counted from that of an
    /// exit: a clock that was set back since reaches it late. `wall` is now by that clock.
    pub(super) fn bound_back_offs(&mut self, actions: &mut PodActions, wall: SystemTime) {
        let now = Instant::now();
        for start in &mut actions.start {
            let Some(block) = &mut start.blocked else { continue };
            let since = *self.held.entry(start.name.clone()).or_insert(now);
            let left = block.backoff.saturating_sub(now.saturating_duration_since(since));
            block.until = block.until.min(wall + left);
            if left.is_zero() {
                start.blocked = None;
            }
        }
    }

    /// Whether to send the event of a start that back-off holds; the event counts as sent then. `is_new`: the start of
    /// the container was not held for this reason yet.
    pub(super) fn event_is_due(&mut self, name: &str, is_new: bool) -> bool {
        let sent = self.event_sent.get(name);
        let is_due = is_new || sent.is_none_or(|sent| sent.elapsed() >= BACK_OFF_EVENT_PERIOD);
        if is_due {
            self.event_sent.insert(name.to_owned(), Instant::now());
        }
        is_due
    }
}

/// The instance of each container that has exited last, by name.
pub(super) type LastExited<'a> = HashMap<&'a str, &'a ContainerId>;

pub(super) fn last_exited(snapshot: &PodSnapshot) -> LastExited<'_> {
    let exited = snapshot.containers.iter().rev().filter(|instance| instance.state == ContainerState::Exited);
    exited.map(|instance| (instance.name.as_str(), &instance.id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ContainerClass;
    use crate::model::StartFailure;
    use crate::model::StartOutcome;
    use crate::model::testing::exited;
    use crate::model::testing::snapshot;

    fn tried(result: Result<ContainerId, StartFailure>) -> SyncOutcome {
        let start = StartOutcome { name: "c".to_owned(), class: ContainerClass::Regular, result };
        SyncOutcome { starts: vec![start], ..SyncOutcome::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn the_cause_of_a_failed_start_is_shown_until_another_start_or_exit() {
        let refused = || {
            let (token, message) = ("CreateContainerError".to_owned(), "refused".to_owned());
            tried(Err(StartFailure { token, message, retry_at: None }))
        };
        let crashed = snapshot(vec![exited("c", 0, 1)]);
        let mut state = SyncState::default();
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "c"), None, "no start has failed");
        state.remember_starts(&crashed, &refused());
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "c"), Some(FAILURE_SHOWN));
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "other"), None);
        let again = snapshot(vec![exited("c", 1, 1), exited("c", 0, 1)]);
        assert_eq!(state.failure_shown_for(&last_exited(&again), "c"), None, "it has exited once more");
        tokio::time::advance(FAILURE_SHOWN).await;
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "c"), None, "it was shown for long enough");
        state.remember_starts(&crashed, &refused());
        state.remember_starts(&crashed, &tried(Ok("c-1".into())));
        assert_eq!(state.failure_shown_for(&last_exited(&crashed), "c"), None, "it was started");
    }

    /// Containers: as many as an object of the API server has room for.
    #[tokio::test(start_paused = true)]
    async fn thousands_of_failed_starts_are_kept() {
        let names: Vec<String> = (0..20_000).map(|number| format!("c{number}")).collect();
        let crashed = |attempt| snapshot(names.iter().map(|name| exited(name, attempt, 1)).collect());
        let (token, message) = ("CreateContainerError".to_owned(), "refused".to_owned());
        let refused = StartFailure { token, message, retry_at: None };
        let start = |name: &String| StartOutcome {
            name: name.clone(),
            class: ContainerClass::Regular,
            result: Err(refused.clone()),
        };
        let outcome = SyncOutcome { starts: names.iter().map(start).collect(), ..SyncOutcome::default() };
        let (before, mut state) = (crashed(0), SyncState::default());
        state.remember_starts(&before, &outcome);
        let again = crashed(1);
        for (view, shown) in [(before, Some(FAILURE_SHOWN)), (again, None)] {
            let exited = last_exited(&view);
            assert!(names.iter().all(|name| state.failure_shown_for(&exited, name) == shown), "{shown:?}");
        }
    }
}
