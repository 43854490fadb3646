//! Removes what pods that are gone left on the node: directories, cgroups and logs (upstream: `HandlePodCleanups`).

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::cgroups::Cgroups;
use crate::model::PodUid;
use crate::recorder::EventType;
use crate::sync::Leftovers;
use crate::sync::SharedPods;
use crate::volumes::Volumes;
use crate::workers::act;
use crate::workers::worker::WorkerContext;

/// An orphan that could not be removed for so long is reported by an event.
const STUCK: Duration = Duration::from_secs(180);

/// Removes leftovers in the background, one pass at a time.
pub struct OrphanCleanup {
    context: Arc<WorkerContext>,
    pods: SharedPods,
    /// Held by the pass that runs.
    failures: Arc<Mutex<Failures>>,
}

impl OrphanCleanup {
    /// Uses the runtime and the directories of the workers, and spares the desired pods.
    pub fn new(context: Arc<WorkerContext>, pods: SharedPods) -> Self {
        Self { context, pods, failures: Arc::default() }
    }
}

impl Leftovers for OrphanCleanup {
    fn sweep(&self, keep: &HashSet<PodUid>) -> bool {
        let Ok(mut failures) = self.failures.clone().try_lock_owned() else { return false };
        let (context, pods, keep) = (self.context.clone(), self.pods.clone(), keep.clone());
        tokio::spawn(async move {
            // A pod is desired before anything of it is made: listing first and asking then spares one that has come since.
            let known = |uid: &str| keep.contains(uid) || pods.by_uid(&PodUid::from(uid)).is_some();
            remove_orphans(&context, &known, &mut failures).await;
            remove_logs(&context, &known, &mut failures).await;
            report_image_usage(&context).await;
        });
        true
    }
}

async fn remove_orphans(context: &WorkerContext, known: impl Fn(&str) -> bool, failures: &mut Failures) {
    let on_disk = pods_on_disk(context.act.volumes.clone()).await;
    let with_cgroup = context.act.cgroups.as_ref().map(Cgroups::pods).unwrap_or_default();
    let left: HashSet<String> = on_disk.iter().cloned().chain(with_cgroup.into_keys()).collect();
    let orphans: Vec<&String> = left.iter().filter(|uid| !known(uid)).collect();
    failures.keep_only(|uid| left.contains(uid) && !known(uid));
    let due: Vec<&String> = orphans.iter().copied().filter(|uid| failures.is_due(uid, Instant::now())).collect();
    for uid in due {
        match act::cleanup_orphan(&context.act, uid).await {
            Ok(()) => {
                failures.forget(uid);
                tracing::info!(pod_uid = uid, "removed the leftovers of an orphaned pod");
            }
            Err(error) => report(context, uid, error.to_string(), failures),
        }
    }
    // As upstream, pods with nothing but a cgroup are not counted.
    let counted = orphans.iter().filter(|uid| on_disk.contains(uid.as_str()));
    let failed = counted.clone().filter(|uid| failures.contains(uid)).count();
    context.act.metrics.iter().for_each(|metrics| metrics.volumes.orphans(counted.clone().count(), failed));
}

/// Sets the gauges of images in use and unused.
async fn report_image_usage(context: &WorkerContext) {
    let Some(metrics) = &context.act.metrics else { return };
    match context.act.images.usage(&context.pleg.all()).await {
        Ok(usage) => {
            for (in_use, images) in [(true, usage.in_use), (false, usage.unused)] {
                metrics.runtime.set_images(in_use, images.len(), images.iter().map(|image| image.size).sum());
            }
        }
        Err(error) => tracing::debug!(%error, "cannot determine the images in use"),
    }
}

async fn pods_on_disk(volumes: Volumes) -> HashSet<String> {
    let listed = tokio::task::spawn_blocking(move || volumes.pods_on_disk()).await;
    let error = match listed {
        Ok(Ok(uids)) => return uids.into_iter().collect(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    tracing::warn!(error, "cannot list the pods' directories");
    HashSet::new()
}

/// Logs why an orphan stays, once for each reason, and records an event if it has stayed for long.
fn report(context: &WorkerContext, uid: &str, error: String, failures: &mut Failures) {
    let message = format!("orphaned pod {uid:?} found, but volumes are not cleaned up: {error}");
    let failure = failures.record(uid, error, Instant::now());
    if failure.is_new {
        tracing::error!(pod_uid = uid, "{message}");
    }
    if failure.is_stuck {
        context.recorder.node_event(EventType::Warning, "OrphanedPodCleanupFailed", &message);
    }
}

/// Key of the logs among the orphans' UIDs; a UID is a file name.
const LOGS: &str = "/logs";

async fn remove_logs(context: &WorkerContext, known: impl Fn(&str) -> bool, failures: &mut Failures) {
    if !failures.is_due(LOGS, Instant::now()) {
        return;
    }
    let errors = act::gc::collect_logs(&context.act, &known).await;
    if errors.is_empty() {
        return failures.forget(LOGS);
    }
    let message = act::joined(&errors);
    if failures.record(LOGS, message.clone(), Instant::now()).is_new {
        context.recorder.node_event(EventType::Warning, "ContainerGCFailed", &message);
    }
}

/// What could not be removed: why, and when it is tried again.
#[derive(Debug, Default)]
struct Failures(HashMap<String, Failure>);

#[derive(Debug)]
struct Failure {
    reason: String,
    attempts: u32,
    since: Instant,
    retry_at: Instant,
    reported: bool,
}

/// What to report of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Recorded {
    /// The reason is another than the last time.
    is_new: bool,
    /// For the first time it has failed for [`STUCK`] with this reason.
    is_stuck: bool,
}

impl Failures {
    fn contains(&self, uid: &str) -> bool {
        self.0.contains_key(uid)
    }

    fn is_due(&self, uid: &str, now: Instant) -> bool {
        self.0.get(uid).is_none_or(|failure| failure.retry_at <= now)
    }

    fn forget(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    fn keep_only(&mut self, keep: impl Fn(&str) -> bool) {
        self.0.retain(|uid, _| uid == LOGS || keep(uid));
    }

    /// A failure of the same reason is tried again after twice the time of the one before.
    fn record(&mut self, uid: &str, reason: String, now: Instant) -> Recorded {
        let held = self.0.remove(uid).filter(|held| held.reason == reason);
        let is_new = held.is_none();
        let mut failure = held.unwrap_or(Failure { reason, attempts: 0, since: now, retry_at: now, reported: false });
        failure.attempts += 1;
        failure.retry_at = now + act::retry_volumes_after(failure.attempts);
        let is_stuck = !failure.reported && now.saturating_duration_since(failure.since) >= STUCK;
        failure.reported |= is_stuck;
        self.0.insert(uid.to_owned(), failure);
        Recorded { is_new, is_stuck }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_reported_once_for_each_reason_and_retried_with_growing_pauses() {
        let (begin, mut failures) = (Instant::now(), Failures::default());
        let (mut attempts, mut reported, mut stuck) = (0, 0, 0);
        for second in (0..3600).step_by(2) {
            let now = begin + Duration::from_secs(second);
            if failures.is_due("u", now) {
                attempts += 1;
                let recorded = failures.record("u", "a mount".to_owned(), now);
                (reported, stuck) = (reported + u32::from(recorded.is_new), stuck + u32::from(recorded.is_stuck));
            }
        }
        assert_eq!((reported, stuck), (1, 1));
        assert!((30..50).contains(&attempts), "{attempts} attempts in an hour");
        let now = begin + Duration::from_secs(3600);
        assert_eq!(failures.record("u", "a file".to_owned(), now), Recorded { is_new: true, is_stuck: false });
        assert!(failures.contains("u") && !failures.is_due("u", now));
        failures.keep_only(|uid| uid != "u");
        assert!(!failures.contains("u") && failures.is_due("u", now));
    }
}
