//! The volumes of pods: those on disk, and how their files are counted.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::sync::watch;

use super::recording;
use crate::config::Feature;
use crate::config::Settings;
use crate::kernel::project_quota;
use crate::metrics::Metrics;
use crate::recorder::Recorder;
use crate::volumes::ProjectQuotas;
use crate::volumes::Volumes;
use crate::volumes::VolumesInUse;

/// Where projects are recorded, see projid(5).
const PROJECT_FILES: &str = "/etc";

/// The volumes on disk, and a warning if volumes in memory may be swapped.
///
/// # Errors
/// The agent is shutting down.
pub(super) async fn on_disk(
    settings: &Settings,
    metrics: &Arc<Metrics>,
    recorder: &Recorder,
    in_use: &watch::Sender<VolumesInUse>,
    node_name: &str,
) -> anyhow::Result<Volumes> {
    let root = settings.flags.root_dir.clone();
    let is_counted = settings.gates.enabled(Feature::LocalStorageCapacityIsolationFSQuotaMonitoring);
    let by_control_plane = settings.kubelet.enable_controller_attach_detach;
    let (metrics, recorder, in_use) = (metrics.clone(), recorder.clone(), in_use.clone());
    let (drivers, node_name) = (PathBuf::from(&settings.kubelet.volume_plugin_dir), node_name.to_owned());
    let reading = tokio::task::spawn_blocking(move || {
        let volumes = Volumes::new(&root).with_metrics(metrics).with_attachments(in_use, by_control_plane);
        let mut volumes = volumes.with_flex_volumes(&drivers, &node_name);
        if is_counted && let Some(quotas) = project_quotas(&root) {
            volumes = volumes.with_project_quotas(quotas);
        }
        if let Err(error) = volumes.reconstruct() {
            tracing::warn!(%error, "cannot reconstruct the volumes on disk");
        }
        recording::announce_volumes(&recorder, &volumes);
        volumes
    });
    reading.await.context("reading the volumes on disk")
}

/// Projects of volumes, if the file system of the root directory counts them; a lack is logged once.
fn project_quotas(root: &Path) -> Option<ProjectQuotas> {
    match project_quota::check(root) {
        Ok(()) => Some(ProjectQuotas::new(Path::new(PROJECT_FILES))),
        Err(error) => {
            let (gate, root) = (Feature::LocalStorageCapacityIsolationFSQuotaMonitoring, root.display());
            tracing::warn!(%gate, %root, %error, "the file system counts no projects: volumes are counted by walking them");
            None
        }
    }
}
