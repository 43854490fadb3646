//! Removes what pods that are gone left on the node: directories, cgroups, ranges of ids and logs (upstream: `HandlePodCleanups`).

use std::collections::HashSet;
use std::sync::Arc;

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
use crate::workers::worker::WorkerContext;

/// All log folders, as the target of their collection.
const LOGS: &str = "log folders";

/// Removes leftovers in the background, one pass at a time.
pub(super) struct OrphanCleanup {
    context: Arc<WorkerContext>,
    pods: SharedPods,
    /// Locked by the pass that runs.
    pass: Arc<Mutex<()>>,
    /// Receives when the next pass is due, if something could not be removed.
    again: mpsc::Sender<Instant>,
}

impl OrphanCleanup {
    /// Uses the runtime and the directories of the workers, and spares the desired pods. `again` receives when the next pass
    /// is due, if something could not be removed.
    pub(super) fn new(context: Arc<WorkerContext>, pods: SharedPods, again: mpsc::Sender<Instant>) -> Self {
        Self { context, pods, pass: Arc::default(), again }
    }
}

impl Leftovers for OrphanCleanup {
    fn sweep(&self, keep: &HashSet<PodUid>) -> bool {
        let Ok(pass) = self.pass.clone().try_lock_owned() else { return false };
        let (context, pods, keep) = (self.context.clone(), self.pods.clone(), keep.clone());
        let again = self.again.clone();
        tokio::spawn(async move {
            // A pod is desired before anything of it is made: listing first and asking then spares one that has come since.
            let known = |uid: &str| keep.contains(uid) || pods.by_uid(&PodUid::from(uid)).is_some();
            let orphans_due = remove_orphans(&context, &known).await;
            // Also what an earlier agent has left without a pod.
            context.act.volumes.look_for_unused();
            let logs_due = remove_logs(&context, &known).await;
            report_image_usage(&context).await;
            drop(pass);
            if let Some(due) = [orphans_due, logs_due].into_iter().flatten().min() {
                // Fails once the sync loop has ended.
                let _ = again.send(due).await;
            }
        });
        true
    }
}

/// Returns when the first of those that could not be removed is due again.
async fn remove_orphans(context: &WorkerContext, known: impl Fn(&str) -> bool) -> Option<Instant> {
    let retries = &context.retries;
    let (on_disk, with_cgroup) = leftovers(context.act.volumes.clone(), context.act.cgroups.clone()).await;
    // A range of ids may be recorded although someone has removed the pod's directory.
    let recorded = context.act.user_namespaces.recorded();
    let left: HashSet<String> = on_disk.union(&with_cgroup).cloned().chain(recorded).collect();
    let orphans: Vec<&String> = left.iter().filter(|uid| !known(uid)).collect();
    retries.keep_only(Operation::RemoveOrphan, |uid| left.contains(uid) && !known(uid));
    let mut first_due: Option<Instant> = None;
    let mut retry_at = |due: Instant| first_due = Some(first_due.map_or(due, |first| first.min(due)));
    for uid in &orphans {
        if let Some(due) = retries.due(Operation::RemoveOrphan, uid) {
            retry_at(due);
            continue;
        }
        match act::cleanup_orphan(&context.act, uid).await {
            Ok(()) => {
                retries.succeeded(Operation::RemoveOrphan, uid);
                tracing::info!(pod_uid = uid, "removed the leftovers of an orphaned pod");
            }
            Err(error) => retry_at(retries.failed(Operation::RemoveOrphan, uid, &error.to_string())),
        }
    }
    // As upstream, pods with nothing but a cgroup are not counted.
    let counted = orphans.iter().filter(|uid| on_disk.contains(uid.as_str()));
    let failed = counted.clone().filter(|uid| retries.is_failing(Operation::RemoveOrphan, uid)).count();
    context.act.metrics.iter().for_each(|metrics| metrics.volumes.orphans(counted.clone().count(), failed));
    first_due
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

/// Returns when it is due again if some could not be removed.
async fn remove_logs(context: &WorkerContext, known: impl Fn(&str) -> bool) -> Option<Instant> {
    let due = context.retries.due(Operation::CollectLogs, LOGS);
    if due.is_some() {
        return due;
    }
    let errors = act::gc::collect_logs(&context.act, &known).await;
    if errors.is_empty() {
        context.retries.succeeded(Operation::CollectLogs, LOGS);
        return None;
    }
    Some(context.retries.failed(Operation::CollectLogs, LOGS, &act::joined(&errors)))
}
