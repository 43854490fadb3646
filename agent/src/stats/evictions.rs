//! What evictions are decided by: usage that is measured now, or missing. Sizes of volumes may be older, if the caller
//! permits that.

use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::EVICTION_RUNTIME_TIMEOUT;
use super::Folder;
use super::PodUsage;
use super::Sizes;
use super::Stats;
use super::StatsError;
use super::extras;
use super::files::Effort;
use super::files::Found;
use super::files::PodFiles;
use super::sample::PodSample;
use super::walks;
use super::walks::Recount;
use crate::model::PodSnapshot;
use crate::model::PodUid;

impl Stats {
    /// What every pod with running containers uses, measured now; its writable layers and logs too `with_disks`. What the
    /// runtime alone can measure is absent if it is slow, or if the pod's own cgroup is known.
    ///
    /// # Errors
    /// With disks, the runtime returned an error, or the disk with the logs does not answer.
    pub async fn pods(&self, with_disks: bool) -> Result<HashMap<PodUid, PodUsage>, StatsError> {
        let mut sample = self.take_files().await?;
        if sample.needs_runtime_for_pods() {
            self.ask_runtime(&mut sample, EVICTION_RUNTIME_TIMEOUT).await;
        }
        if !with_disks {
            return Ok(sample.pods.iter().map(|pod| (pod.pod.uid.clone(), PodUsage::of(pod))).collect());
        }
        let writable = extras::writable_layers(&self.source.runtime).await?;
        let stats = self.clone();
        let measured = tokio::task::spawn_blocking(move || {
            let mut files = stats.files_now(|_| true)?;
            let of_pod = |pod: &PodSample| {
                let files = files.remove(&pod.pod.uid).unwrap_or_default();
                (pod.pod.uid.clone(), PodUsage::of(pod).with_disks(pod, &files, &writable))
            };
            Ok(sample.pods.iter().map(of_pod).collect())
        })
        .await;
        measured.map_err(|error| StatsError::Stopped(error.to_string()))?
    }

    /// Writable layers, logs and other files of the wanted pods with running containers, measured now. Nothing else is, and
    /// nothing of other pods.
    ///
    /// # Errors
    /// The runtime returned an error, or the disk with the logs does not answer.
    pub async fn files_of(&self, wanted: HashSet<PodUid>) -> Result<HashMap<PodUid, PodUsage>, StatsError> {
        let mut snapshots = self.source.snapshots.all();
        let of_all = snapshots.len();
        snapshots.retain(|snapshot| wanted.contains(&snapshot.pod.uid) && snapshot.running().next().is_some());
        if snapshots.is_empty() {
            return Ok(HashMap::new());
        }
        let pods: Vec<&PodUid> = snapshots.iter().map(|snapshot| &snapshot.pod.uid).collect();
        let writable = extras::writable_layers_of(&self.source.runtime, &pods, of_all).await?;
        let stats = self.clone();
        let measured = tokio::task::spawn_blocking(move || {
            let mut files = stats.files_now(|uid| wanted.contains(uid))?;
            let of_pod = |snapshot: &Arc<PodSnapshot>| {
                let files = files.remove(&snapshot.pod.uid).unwrap_or_default();
                (snapshot.pod.uid.clone(), PodUsage::of_files(snapshot, &files, &writable))
            };
            Ok(snapshots.iter().map(of_pod).collect())
        })
        .await;
        measured.map_err(|error| StatsError::Stopped(error.to_string()))?
    }

    /// Sizes of folders of volumes. `now`: counted in this moment; else, unless the file system counts them, counted when
    /// that is due, which may be later. A folder that was never counted is absent; one that takes long to count has at least the
    /// size that was found so far.
    pub async fn volume_sizes(&self, folders: Vec<Folder>, now: bool) -> Sizes {
        self.sizes(folders, if now { Recount::Now } else { Recount::After(Duration::ZERO) }).await
    }

    /// Sizes of those of the folders that are walked, each counted now and without a pause, which may take minutes. One that
    /// takes longer than ten is absent. If cancelled, a walk that runs goes on.
    pub async fn recounted(&self, folders: Vec<Folder>) -> Sizes {
        let (_, walked) = self.quotas.sizes(folders).await;
        walks::counted_at_once(walked, &self.durations).await
    }

    /// Files of the wanted pods as they are now. Pods are evicted by them, which old or missing ones do not permit.
    fn files_now(&self, wanted: impl Fn(&PodUid) -> bool) -> Result<HashMap<PodUid, PodFiles>, StatsError> {
        let Found { files, is_late } = self.found_files(wanted, Effort::NOW);
        if is_late { Err(StatsError::Pods("their logs are not measured yet".to_owned())) } else { Ok(files) }
    }
}
