//! What dead pods leave on the node: directories and cgroups of pods that nobody knows.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use crate::model::PodUid;
use crate::sync::Leftovers;
use crate::workers::act;
use crate::workers::worker::WorkerContext;

/// Sweeps in the background, one pass at a time.
pub struct Sweeper {
    context: Arc<WorkerContext>,
    sweeping: Arc<AtomicBool>,
}

impl Sweeper {
    /// A sweeper with the workers' own tools.
    pub fn new(context: Arc<WorkerContext>) -> Self {
        Self { context, sweeping: Arc::default() }
    }
}

impl Leftovers for Sweeper {
    fn sweep(&self, keep: &HashSet<PodUid>) -> bool {
        if self.sweeping.swap(true, SeqCst) {
            return false;
        }
        let (context, sweeping, keep) = (self.context.clone(), self.sweeping.clone(), keep.clone());
        tokio::spawn(async move {
            sweep(&context, &keep).await;
            sweeping.store(false, SeqCst);
        });
        true
    }
}

async fn sweep(context: &WorkerContext, keep: &HashSet<PodUid>) {
    let on_disk = context.act.volumes.pods_on_disk().unwrap_or_else(|error| {
        tracing::warn!(%error, "the pods' directories cannot be listed");
        Vec::new()
    });
    let with_cgroup = context.act.cgroups.as_ref().map(crate::kernel::cgroup::Cgroups::pods).unwrap_or_default();
    let left: HashSet<String> = on_disk.into_iter().chain(with_cgroup.into_keys()).collect();
    for uid in left.iter().filter(|uid| !keep.contains(uid.as_str())) {
        match act::cleanup_orphan(&context.act, uid).await {
            Ok(()) => tracing::info!(pod_uid = uid, "removed what a dead pod had left"),
            Err(error) => tracing::warn!(pod_uid = uid, error, "leftovers of a dead pod were not removed"),
        }
    }
}
