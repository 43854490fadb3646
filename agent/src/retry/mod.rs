//! Retries of failed operations on pods, on what they left and on their API objects: the pause before the next attempt, one
//! log line per change of the reason, metrics, and an event on the node.
//!
//! Keyed by operation and target, so that the state outlives the worker that failed. Decides nothing about the operations;
//! callers ask when the next attempt is due and report results.

mod operation;

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::model::Backoff;
use crate::model::quote::shortened;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use operation::Failure;
pub use operation::Operation;

/// An operation that has failed for this long is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(180);
/// A failure that is not followed by another attempt for this long is dropped: its target no longer exists.
const DROP_AFTER: Duration = Duration::from_secs(1800);
/// Failing targets that are tracked; beyond that, all have the longest pause.
const MAX_TRACKED: usize = 4096;
/// Stuck targets of one operation that are reported by an event each; metrics count all. What concerns every pod, as an API
/// server that fails, would exhaust the events that a node may have.
const MOST_REPORTED: usize = 5;
/// What is kept of a reason, in bytes. It may quote what only the size of a pod limits, such as the path of a hook.
const REASON_LIMIT: usize = 4 * 1024;
/// The longest step of what is due together, see [`Operation::is_retried_together`].
const LONGEST_STEP: Duration = Duration::from_secs(30);

/// An operation and its target.
type Key = (Operation, String);

/// An operation that fails on one target.
#[derive(Debug)]
struct Failing {
    backoff: Backoff,
    /// When the first attempt in a row failed.
    since: Instant,
    /// When the next attempt is due.
    due: Instant,
    /// Why the last attempt failed.
    reason: String,
    is_stuck: bool,
}

impl Failing {
    /// The operation fails for the first time.
    fn new(operation: Operation, now: Instant) -> Self {
        Self { backoff: operation.backoff(), since: now, due: now, reason: String::new(), is_stuck: false }
    }

    /// Logs the failure, as a warning if the reason is another than the last time. Returns whether it is.
    fn replace_reason(&mut self, operation: Operation, target: &str, reason: &str, now: Instant) -> bool {
        let (operation, failures, pause) = (operation.as_str(), self.backoff.failures(), self.due - now);
        let is_new = self.reason != reason;
        if is_new {
            tracing::warn!(operation, target, reason, failures, retry_in = ?pause, "operation failed");
            reason.clone_into(&mut self.reason);
        } else {
            tracing::debug!(operation, target, reason, failures, retry_in = ?pause, "failed again");
        }
        is_new
    }

    /// Marks it as stuck after [`STUCK_AFTER`]. True the first time.
    fn becomes_stuck(&mut self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= STUCK_AFTER && !std::mem::replace(&mut self.is_stuck, true)
    }
}

/// All failing operations. Clones share them.
#[derive(Clone, Debug)]
pub struct RetryTracker {
    failing: Arc<Mutex<HashMap<Key, Failing>>>,
    recorder: Recorder,
    metrics: Option<Arc<Metrics>>,
    /// From when on the steps of what is due together are counted.
    began: Instant,
}

impl RetryTracker {
    /// Nothing has failed yet. Events of stuck operations go to `recorder`.
    pub fn new(recorder: Recorder, metrics: Option<Arc<Metrics>>) -> Self {
        Self { failing: Arc::default(), recorder, metrics, began: Instant::now() }
    }

    /// When the next attempt is due; `None` if it is due now.
    pub fn due(&self, operation: Operation, target: &str) -> Option<Instant> {
        let failing = self.lock();
        failing.get(&(operation, target.to_owned())).map(|failing| failing.due).filter(|due| *due > Instant::now())
    }

    /// An attempt failed. Returns when the next is due: pauses double up to the operation's longest, and are lengthened by
    /// up to a half at random, those of housekeeping also up to the next step.
    pub fn failed(&self, operation: Operation, target: &str, reason: &str) -> Instant {
        let (now, reason) = (Instant::now(), shortened(reason, REASON_LIMIT));
        let mut all = self.lock();
        let key = (operation, target.to_owned());
        if !all.contains_key(&key) {
            all.retain(|_, failing| now.saturating_duration_since(failing.due) < DROP_AFTER);
            if all.len() >= MAX_TRACKED {
                return now + operation.bounds().1;
            }
        }
        let failing = all.entry(key).or_insert_with(|| Failing::new(operation, now));
        failing.due = self.next_attempt(operation, failing, now);
        let is_new = failing.replace_reason(operation, target, &reason, now);
        let newly_stuck = failing.becomes_stuck(now);
        let (since, due) = (failing.since, failing.due);
        // Without those that are not retried any more.
        let is_retried = |failing: &&Failing| now.saturating_duration_since(failing.due) < STUCK_AFTER;
        let became_stuck = newly_stuck && stuck(operation, &all).filter(is_retried).count() <= MOST_REPORTED;
        let failure = Failure { reason: &reason, is_new, became_stuck, since };
        if let Some((event, message)) = operation.event(target, &failure) {
            self.recorder.node_event(EventType::Warning, event, &message);
        }
        self.measure(operation, &all, true);
        due
    }

    /// Counts a failure in the back-off; returns when the next attempt is due.
    fn next_attempt(&self, operation: Operation, failing: &mut Failing, now: Instant) -> Instant {
        let due = now + failing.backoff.failed(fastrand::f64() * 0.5);
        if operation.is_retried_together() {
            return next_step(self.began, due, failing.backoff.pause().min(LONGEST_STEP));
        }
        due
    }

    /// Whether the last attempt failed.
    pub fn is_failing(&self, operation: Operation, target: &str) -> bool {
        self.lock().contains_key(&(operation, target.to_owned()))
    }

    /// Removes the targets of an operation that need it no longer.
    pub fn keep_only(&self, operation: Operation, keep: impl Fn(&str) -> bool) {
        let mut all = self.lock();
        let before = all.len();
        all.retain(|(of, target), _| *of != operation || keep(target));
        if all.len() < before {
            self.measure(operation, &all, false);
        }
    }

    /// As [`Self::keep_only`] with a set of targets, which is made only if the operation fails on any, and without the lock: it
    /// may be large.
    pub fn keep_listed(&self, operation: Operation, listed: impl FnOnce() -> HashSet<String>) {
        if self.lock().keys().all(|(of, _)| *of != operation) {
            return;
        }
        let listed = listed();
        self.keep_only(operation, |target| listed.contains(target));
    }

    /// An attempt succeeded, or the target no longer exists.
    pub fn succeeded(&self, operation: Operation, target: &str) {
        let mut all = self.lock();
        let Some(failing) = all.remove(&(operation, target.to_owned())) else { return };
        let (operation_name, failures) = (operation.as_str(), failing.backoff.failures());
        tracing::info!(operation = operation_name, target, failures, "operation succeeded after failures");
        self.measure(operation, &all, false);
    }

    fn measure(&self, operation: Operation, all: &HashMap<Key, Failing>, retried: bool) {
        let Some(metrics) = &self.metrics else { return };
        let until = stuck(operation, all).map(|failing| failing.due + DROP_AFTER);
        metrics.retries.stuck(operation.as_str(), until.collect());
        if retried {
            metrics.retries.retried(operation.as_str());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Failing>> {
        // Entries are replaced whole: a panic elsewhere leaves the map usable.
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The stuck targets of an operation.
fn stuck(operation: Operation, all: &HashMap<Key, Failing>) -> impl Iterator<Item = &Failing> {
    all.iter().filter(move |((of, _), failing)| *of == operation && failing.is_stuck).map(|(_, failing)| failing)
}

/// The first multiple of `step` since `began` that is after `due`.
fn next_step(began: Instant, due: Instant, step: Duration) -> Instant {
    let steps = due.saturating_duration_since(began).as_millis() / step.as_millis().max(1) + 1;
    began + step.saturating_mul(u32::try_from(steps).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::recorder::testing::listening;

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_and_an_event_is_sent_once_after_three_minutes() {
        let (recorder, mut events) = listening();
        let metrics = Metrics::new();
        let retries = RetryTracker::new(recorder, Some(metrics.clone()));
        let (start, mut attempts) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_secs(3600) {
            assert_eq!(retries.due(Operation::RemovePod, "web"), None);
            let due = retries.failed(Operation::RemovePod, "web", "busy");
            assert_eq!(retries.due(Operation::RemovePod, "web"), Some(due));
            tokio::time::sleep_until(due).await;
            attempts += 1;
        }
        assert!((10..25).contains(&attempts), "{attempts} in an hour");
        let sent = events.take();
        assert_eq!(sent.len(), 1, "{sent:?}");
        assert!(sent[0].starts_with("node W OperationStuck: remove_pod of web has failed for "), "{sent:?}");
        let text = metrics.render().expect("metrics");
        assert!(text.contains("keblet_stuck_operations{operation=\"remove_pod\"} 1"), "{text}");
        assert!(text.contains(&format!("keblet_retries_total{{operation=\"remove_pod\"}} {attempts}")), "{text}");
        retries.succeeded(Operation::RemovePod, "web");
        assert_eq!(retries.due(Operation::RemovePod, "web"), None);
        let text = metrics.render().expect("metrics");
        assert!(text.contains("keblet_stuck_operations{operation=\"remove_pod\"} 0"), "{text}");
    }

    /// As while an API server answers every status with an error.
    #[tokio::test(start_paused = true)]
    async fn of_many_stuck_targets_a_few_are_reported_and_all_are_counted() {
        let ((recorder, mut events), metrics) = (listening(), Metrics::new());
        let retries = RetryTracker::new(recorder, Some(metrics.clone()));
        let fail = |count: u32| {
            for target in 0..count {
                retries.failed(Operation::SendStatus, &target.to_string(), "500");
            }
        };
        fail(110);
        tokio::time::sleep(STUCK_AFTER).await;
        fail(110);
        assert_eq!(events.take().len(), MOST_REPORTED);
        let text = metrics.render().expect("metrics");
        assert!(text.contains("keblet_stuck_operations{operation=\"send_status\"} 110\n"), "{text}");
        retries.failed(Operation::KillPod, "a", "busy");
        (0..110).for_each(|target| retries.succeeded(Operation::SendStatus, &target.to_string()));
        fail(1);
        tokio::time::sleep(STUCK_AFTER).await;
        retries.failed(Operation::KillPod, "a", "busy");
        fail(1);
        assert_eq!(events.take().len(), 2, "another operation, and a later failure");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stuck_target_that_is_not_retried_any_more_is_not_counted() {
        let metrics = Metrics::new();
        let retries = RetryTracker::new(Recorder::default(), Some(metrics.clone()));
        let start = Instant::now();
        while start.elapsed() < 2 * STUCK_AFTER {
            tokio::time::sleep_until(retries.failed(Operation::CollectGarbage, "web", "busy")).await;
        }
        let shows = |count: u32| {
            let line = format!("keblet_stuck_operations{{operation=\"collect_garbage\"}} {count}\n");
            metrics.render().expect("metrics").contains(&line)
        };
        assert!(shows(1));
        // Its pod is removed.
        tokio::time::sleep(DROP_AFTER + Duration::from_secs(1)).await;
        assert!(shows(0));
    }

    #[tokio::test(start_paused = true)]
    async fn an_orphan_that_stays_is_reported_once_and_dropped_with_its_directory() {
        let (recorder, mut events) = listening();
        let retries = RetryTracker::new(recorder, None);
        let (start, mut attempts) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_secs(3600) {
            let due = retries.failed(Operation::RemoveOrphan, "u", "a mount");
            assert!(retries.is_failing(Operation::RemoveOrphan, "u"));
            tokio::time::sleep_until(due).await;
            attempts += 1;
        }
        assert!((25..50).contains(&attempts), "{attempts} attempts in an hour");
        let message = "orphaned pod \"u\" found, but volumes are not cleaned up: a mount";
        assert_eq!(events.take(), [format!("node W OrphanedPodCleanupFailed: {message}")]);
        retries.failed(Operation::CollectLogs, "", "a file");
        retries.keep_only(Operation::RemoveOrphan, |uid| uid != "u");
        assert!(!retries.is_failing(Operation::RemoveOrphan, "u"), "no longer there");
        assert!(retries.is_failing(Operation::CollectLogs, ""), "another operation");
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_of_targets_is_made_once_and_only_if_the_operation_fails() {
        let (retries, made) = (RetryTracker::new(Recorder::default(), None), Cell::new(0));
        let listed = || {
            made.set(made.get() + 1);
            HashSet::from(["b".to_owned()])
        };
        retries.keep_listed(Operation::RotateLog, listed);
        retries.failed(Operation::RecoverLog, "a", "busy");
        retries.keep_listed(Operation::RotateLog, listed);
        assert_eq!(made.get(), 0, "another operation fails");
        for target in ["a", "b", "c"] {
            retries.failed(Operation::RotateLog, target, "busy");
        }
        retries.keep_listed(Operation::RotateLog, listed);
        assert_eq!(made.get(), 1);
        let failing = ["a", "b", "c"].map(|target| retries.is_failing(Operation::RotateLog, target));
        assert_eq!(failing, [false, true, false]);
        assert!(retries.is_failing(Operation::RecoverLog, "a"), "another operation");
    }

    /// Every pass reads everything on the node.
    #[tokio::test(start_paused = true)]
    async fn what_housekeeping_retries_is_due_together() {
        for operation in [Operation::RemoveOrphan, Operation::RemovePod] {
            let retries = RetryTracker::new(Recorder::default(), None);
            let targets: Vec<String> = (0..30).map(|target| target.to_string()).collect();
            let (start, mut passes) = (Instant::now(), Vec::new());
            while start.elapsed() < Duration::from_secs(4200) {
                passes.push(start.elapsed());
                let due = |target: &String| {
                    retries.due(operation, target).unwrap_or_else(|| retries.failed(operation, target, "a mount"))
                };
                tokio::time::sleep_until(targets.iter().map(due).min().expect("targets")).await;
            }
            assert!(passes[1] < 3 * operation.bounds().0, "the first pauses stay short: {passes:?}");
            let (first, last): (Vec<Duration>, Vec<Duration>) =
                passes.iter().copied().partition(|at| *at < Duration::from_secs(600));
            assert!(first.len() <= 40 && (8..=121).contains(&last.len()), "{operation:?}: {passes:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_beginning_of_a_long_reason_is_kept() {
        let retries = RetryTracker::new(Recorder::default(), None);
        retries.failed(Operation::SyncPod, "a", &"é".repeat(1 << 20));
        let all = retries.lock();
        let kept = all.values().map(|failing| failing.reason.as_str()).collect::<String>();
        assert!(kept.len() <= REASON_LIMIT && kept.ends_with("é..."), "{}", kept.len());
    }

    #[tokio::test(start_paused = true)]
    async fn logs_that_stay_are_reported_once_for_each_reason() {
        let (recorder, mut events) = listening();
        let retries = RetryTracker::new(recorder, None);
        for reason in ["a", "a", "b", "b", "b"] {
            tokio::time::sleep_until(retries.failed(Operation::CollectLogs, "", reason)).await;
        }
        assert_eq!(events.take(), ["node W ContainerGCFailed: a", "node W ContainerGCFailed: b"]);
    }

    /// In the kubelet: `backOffPeriod`, the pause without network, and those of volumes (`exponentialbackoff`).
    #[tokio::test(start_paused = true)]
    async fn the_pauses_of_each_operation_double_from_the_first_to_the_longest() {
        let secs = Duration::from_secs_f64;
        for (operation, first, second, longest) in [
            (Operation::SyncPod, 10.0, 20.0, 60.0),
            (Operation::AwaitNetwork, 1.0, 2.0, 10.0),
            (Operation::KillPod, 10.0, 20.0, 60.0),
            (Operation::ReleasePod, 10.0, 20.0, 60.0),
            (Operation::CollectGarbage, 60.0, 120.0, 300.0),
            (Operation::CollectLogs, 0.5, 1.0, 122.0),
            (Operation::AdoptStaticPods, 0.1, 0.2, 3.0),
            (Operation::ReclaimDisk, 10.0, 20.0, 300.0),
            (Operation::ListImages, 10.0, 20.0, 40.0),
            (Operation::SetPodCidr, 5.0, 10.0, 60.0),
            (Operation::RotateLog, 5.0, 10.0, 60.0),
            (Operation::RecoverLog, 5.0, 10.0, 300.0),
            (Operation::SendStatus, 0.1, 0.2, 6.4),
            (Operation::SyncMirrorPod, 0.1, 0.2, 6.4),
            (Operation::ReleaseDevice, 0.5, 1.0, 122.0),
            (Operation::EnforceAllocatable, 60.0, 60.0, 60.0),
        ] {
            let retries = RetryTracker::new(Recorder::default(), None);
            let mut pauses = Vec::new();
            for _ in 0..12 {
                let due = retries.failed(operation, "target", "busy");
                pauses.push(due - Instant::now());
                tokio::time::sleep_until(due).await;
            }
            let expected = [(pauses[0], first), (pauses[1], second), (pauses[11], longest)];
            for (pause, expected) in expected.map(|(pause, expected)| (pause, secs(expected))) {
                assert!(pause >= expected && pause <= expected.mul_f64(1.5), "{operation:?}: {pauses:?}");
            }
        }
        for (operation, longest) in [(Operation::RemovePod, 300.0), (Operation::RemoveOrphan, 122.0)] {
            let mut backoff = operation.backoff();
            let pauses: Vec<Duration> = (0..12).map(|_| backoff.failed(0.0)).collect();
            let first = if operation == Operation::RemovePod { 1.0 } else { 0.5 };
            assert_eq!((pauses[0], pauses[11]), (secs(first), secs(longest)), "{operation:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn targets_have_pauses_of_their_own_and_are_dropped() {
        let retries = RetryTracker::new(Recorder::default(), None);
        retries.failed(Operation::KillPod, "a", "busy");
        assert_eq!(retries.due(Operation::KillPod, "b"), None);
        assert_eq!(retries.due(Operation::SyncPod, "a"), None);
        tokio::time::sleep(DROP_AFTER + Duration::from_secs(60)).await;
        retries.failed(Operation::KillPod, "b", "busy");
        assert_eq!(retries.lock().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_tracked_targets_is_bounded() {
        let retries = RetryTracker::new(Recorder::default(), None);
        for target in 0..MAX_TRACKED {
            assert!(retries.failed(Operation::RemovePod, &target.to_string(), "busy") > Instant::now());
        }
        let longest = Instant::now() + Duration::from_secs(300);
        assert_eq!(retries.failed(Operation::RemovePod, "one more", "busy"), longest, "nothing is known of it");
        assert!(retries.failed(Operation::RemovePod, "0", "busy") < longest, "its second pause");
        assert_eq!(retries.lock().len(), MAX_TRACKED);
    }
}
