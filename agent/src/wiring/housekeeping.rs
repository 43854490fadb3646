//! What dead pods leave on the node: directories, cgroups and logs of pods that nobody knows.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use crate::model::PodUid;
use crate::recorder::EventType;
use crate::sync::Leftovers;
use crate::sync::SharedPods;
use crate::workers::act;
use crate::workers::worker::WorkerContext;

/// Sweeps in the background, one pass at a time.
pub struct Sweeper {
    context: Arc<WorkerContext>,
    pods: SharedPods,
    sweeping: Arc<AtomicBool>,
}

impl Sweeper {
    /// A sweeper with the workers' own tools, that spares the desired pods.
    pub fn new(context: Arc<WorkerContext>, pods: SharedPods) -> Self {
        Self { context, pods, sweeping: Arc::default() }
    }
}

impl Leftovers for Sweeper {
    fn sweep(&self, keep: &HashSet<PodUid>) -> bool {
        if self.sweeping.swap(true, SeqCst) {
            return false;
        }
        let (context, sweeping, keep) = (self.context.clone(), self.sweeping.clone(), keep.clone());
        let pods = self.pods.clone();
        tokio::spawn(async move {
            // A pod that has come since is desired before anything of it is made: who lists first and asks then spares it.
            let known = |uid: &str| keep.contains(uid) || pods.by_uid(&PodUid::from(uid)).is_some();
            sweep(&context, known).await;
            sweeping.store(false, SeqCst);
        });
        true
    }
}

async fn sweep(context: &WorkerContext, known: impl Fn(&str) -> bool) {
    let on_disk = context.act.volumes.pods_on_disk().unwrap_or_else(|error| {
        tracing::warn!(%error, "the pods' directories cannot be listed");
        Vec::new()
    });
    let with_cgroup = context.act.cgroups.as_ref().map(crate::kernel::cgroup::Cgroups::pods).unwrap_or_default();
    let on_disk: HashSet<String> = on_disk.into_iter().collect();
    let left: HashSet<String> = on_disk.iter().cloned().chain(with_cgroup.into_keys()).collect();
    let (mut removed, mut failed) = (0, 0);
    for uid in left.iter().filter(|uid| !known(uid)) {
        // Only directories are counted, not what has left a cgroup and nothing else.
        let had_directory = usize::from(on_disk.contains(uid));
        match act::cleanup_orphan(&context.act, uid).await {
            Ok(()) => {
                removed += had_directory;
                tracing::info!(pod_uid = uid, "removed what a dead pod had left");
            }
            Err(error) => {
                failed += had_directory;
                tracing::warn!(pod_uid = uid, error, "leftovers of a dead pod were not removed");
            }
        }
    }
    let errors = act::gc::collect_logs(&context.act, &known).await;
    if !errors.is_empty() {
        context.recorder.node_event(EventType::Warning, "ContainerGCFailed", &errors.join(", "));
    }
    context.act.metrics.iter().for_each(|metrics| metrics.volumes.swept(removed, failed));
    report_image_usage(context).await;
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
