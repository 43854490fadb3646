//! Removes what pods that are gone left on the node: directories, cgroups, ranges of ids and logs (upstream: `HandlePodCleanups`).

use std::collections::BTreeSet;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::sync::Mutex;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::cgroups::Cgroups;
use crate::model::PodUid;
use crate::retry::Operation;
use crate::sync::Leftovers;
use crate::sync::SharedPods;
use crate::volumes::Volumes;
use crate::workers::act;
use crate::workers::registry::WorkerRegistry;
use crate::workers::worker::WorkerContext;

/// All log folders, as the target of their collection.
const LOGS: &str = "log folders";
/// Orphans that are removed at the same time. The server of a volume that one has may not answer for minutes.
const AT_ONCE: usize = 8;
/// A pass begins at most this often: it lists directories, log folders and cgroups of all pods. What an ended pod has is
/// removed by its own worker, which waits for no pass.
const PASS_INTERVAL: Duration = Duration::from_secs(2);
/// Log links that dangle, or are missing, are looked for at most this often, as by the kubelet: every link is followed for
/// that.
const LINKS_INTERVAL: Duration = Duration::from_secs(60);

/// Whether the pod of a UID is desired, or something may still be created for it.
type Known<'a> = &'a (dyn Fn(&str) -> bool + Sync);

/// Removes leftovers in the background, one pass at a time.
pub(super) struct OrphanCleanup {
    context: Arc<WorkerContext>,
    pods: SharedPods,
    registry: WorkerRegistry,
    /// Locked by the pass that runs.
    pace: Arc<Mutex<Pace>>,
    /// Receives when the next pass is due, if something could not be removed or not be looked for yet.
    again: mpsc::Sender<Instant>,
}

impl OrphanCleanup {
    /// Uses the runtime and the directories of the workers, and spares the desired pods and those with a worker. `again`
    /// receives when the next pass is due, if something could not be removed or not be looked for yet.
    pub(super) fn new(
        context: Arc<WorkerContext>,
        pods: SharedPods,
        registry: WorkerRegistry,
        again: mpsc::Sender<Instant>,
    ) -> Self {
        let pace = Pace { passes: AtMostEvery::new(PASS_INTERVAL), links: AtMostEvery::new(LINKS_INTERVAL) };
        Self { context, pods, registry, pace: Arc::new(Mutex::new(pace)), again }
    }
}

/// When passes and their searches for dangling log links may begin.
struct Pace {
    passes: AtMostEvery,
    links: AtMostEvery,
}

/// Work that begins at most once in an interval.
struct AtMostEvery {
    interval: Duration,
    /// When it may begin again; `None` if it has never begun.
    due: Option<Instant>,
}

impl AtMostEvery {
    const fn new(interval: Duration) -> Self {
        Self { interval, due: None }
    }

    /// Begins now. If it is too early for that, returns when it is due.
    fn begin(&mut self, now: Instant) -> Option<Instant> {
        let due = self.due.filter(|due| *due > now);
        if due.is_none() {
            self.due = Some(now + self.interval);
        }
        due
    }
}

impl Leftovers for OrphanCleanup {
    fn remove_leftovers(&self, keep: &HashSet<PodUid>) -> Option<Instant> {
        let now = Instant::now();
        let Ok(mut pace) = self.pace.clone().try_lock_owned() else { return Some(now + PASS_INTERVAL) };
        let due = pace.passes.begin(now);
        if due.is_some() {
            return due;
        }
        let (context, pods, keep) = (self.context.clone(), self.pods.clone(), keep.clone());
        let (registry, again) = (self.registry.clone(), self.again.clone());
        tokio::spawn(async move {
            // A pod is desired before anything is created for it, and has its worker until it is cleaned up: listing first
            // and checking afterwards spares a pod that was added since, also if it has been deleted again.
            let known = |uid: &str| {
                let of_pod = PodUid::from(uid);
                keep.contains(uid) || pods.by_uid(&of_pod).is_some() || registry.phase(&of_pod).is_some()
            };
            let logs = remove_logs_and_links(&context, &known, &mut pace.links);
            let (orphans_due, logs_due) = tokio::join!(remove_orphans(&context, &known), logs);
            // Also what an earlier agent has left without a pod.
            context.act.volumes.request_unused_search();
            drop(pace);
            if let Some(due) = [orphans_due, logs_due].into_iter().flatten().min() {
                // Fails once the sync loop has ended.
                let _ = again.send(due).await;
            }
        });
        None
    }
}

/// Returns when the first of those that could not be removed is due again.
async fn remove_orphans(context: &WorkerContext, known: Known<'_>) -> Option<Instant> {
    let retries = &context.retries;
    let (on_disk, with_cgroup) = leftovers(context.act.volumes.clone(), context.act.cgroups.clone()).await;
    // A range of ids may be recorded although the pod's directory was removed.
    let recorded = context.act.user_namespaces.recorded();
    let left: BTreeSet<String> = on_disk.union(&with_cgroup).cloned().chain(recorded).collect();
    let orphans: Vec<&String> = left.iter().filter(|uid| !known(uid)).collect();
    retries.keep_only(Operation::RemoveOrphan, |uid| left.contains(uid) && !known(uid));
    let removals: Vec<_> = orphans.iter().map(|uid| remove_orphan(context, uid, known)).collect();
    let due: Vec<Option<Instant>> = stream::iter(removals).buffer_unordered(AT_ONCE).collect().await;
    // As upstream, pods with nothing but a cgroup are not counted.
    let counted = orphans.iter().filter(|uid| on_disk.contains(uid.as_str()));
    let failed = counted.clone().filter(|uid| retries.is_failing(Operation::RemoveOrphan, uid)).count();
    context.act.metrics.iter().for_each(|metrics| metrics.volumes.orphans(counted.clone().count(), failed));
    due.into_iter().flatten().min()
}

/// Returns when it is due again if it could not be removed.
async fn remove_orphan(context: &WorkerContext, uid: &str, known: Known<'_>) -> Option<Instant> {
    let retries = &context.retries;
    let due = retries.due(Operation::RemoveOrphan, uid);
    if due.is_some() {
        return due;
    }
    // Checked again: the pass may have waited for others for minutes.
    match act::remove_orphan(&context.act, uid, known).await {
        Ok(true) => {
            retries.succeeded(Operation::RemoveOrphan, uid);
            tracing::info!(pod_uid = uid, "removed the leftovers of an orphaned pod");
            None
        }
        Ok(false) => {
            retries.keep_only(Operation::RemoveOrphan, |failing| failing != uid);
            None
        }
        Err(error) => Some(retries.failed(Operation::RemoveOrphan, uid, &error.to_string())),
    }
}

/// UIDs of the pods that have a directory, and of those that have a cgroup.
async fn leftovers(volumes: Volumes, cgroups: Option<Cgroups>) -> (HashSet<String>, HashSet<String>) {
    let list = move || (volumes.pods_on_disk(), cgroups.map(|cgroups| cgroups.pods()).unwrap_or_default());
    // The agent is shutting down.
    let Ok((listed, with_cgroup)) = tokio::task::spawn_blocking(list).await else { return Default::default() };
    let on_disk = listed.unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot list the pods' directories");
        Vec::new()
    });
    (on_disk.into_iter().collect(), with_cgroup.into_keys().collect())
}

/// Returns when it is due again if some could not be removed, or if it is too early to check links.
async fn remove_logs_and_links(context: &WorkerContext, known: Known<'_>, links: &mut AtMostEvery) -> Option<Instant> {
    let logs_due = remove_logs(context, known).await;
    let links_due = links.begin(Instant::now());
    if links_due.is_none() {
        act::gc::remove_dangling_links(&context.act).await;
        act::gc::make_missing_links(&context.act, &context.pleg.all()).await;
    }
    [logs_due, links_due].into_iter().flatten().min()
}

/// Returns when it is due again if some could not be removed.
async fn remove_logs(context: &WorkerContext, known: Known<'_>) -> Option<Instant> {
    let due = context.retries.due(Operation::CollectLogs, LOGS);
    if due.is_some() {
        return due;
    }
    let errors = act::gc::collect_logs(&context.act, known).await;
    if errors.is_empty() {
        context.retries.succeeded(Operation::CollectLogs, LOGS);
        return None;
    }
    Some(context.retries.failed(Operation::CollectLogs, LOGS, &act::joined(&errors)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_is_requested_too_often_begins_once_in_an_interval_and_as_soon_as_it_is_due() {
        let (start, mut passes) = (Instant::now(), AtMostEvery::new(PASS_INTERVAL));
        let begun = (0..420).filter(|reason| passes.begin(start + Duration::from_secs(*reason) / 7).is_none()).count();
        assert_eq!(begun, 30, "seven reasons a second, for a minute");
        let last = start + Duration::from_secs(58);
        assert_eq!(passes.begin(last + Duration::from_millis(1999)), Some(last + PASS_INTERVAL));
        assert_eq!(passes.begin(last + PASS_INTERVAL), None);
        assert_eq!(passes.begin(start + Duration::from_secs(600)), None, "after a pause it begins at once");
    }
}
