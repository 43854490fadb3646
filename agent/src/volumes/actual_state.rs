//! Which volumes are set up, as far as this process knows: what it has set up itself, and what it found on disk when it
//! started. Decides nothing; only counts depend on it.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use k8s_openapi::api::core::v1::Volume;

use super::api;
use super::layout;
use crate::metrics::Metrics;

/// Name of the plugin that provides a volume, as upstream's metrics spell it; `None` for kinds not supported here.
pub(super) fn plugin_of(volume: &Volume) -> Option<&'static str> {
    match api::Kind::of(volume) {
        Some(kind) => named(kind.plugin()),
        None if volume.host_path.is_some() => Some(HOST_PATH),
        None if volume.empty_dir.is_some() => named(layout::EMPTY_DIR),
        None => None,
    }
}

const HOST_PATH: &str = "kubernetes.io/host-path";

/// The plugin of a directory in a pod's `volumes`.
pub(super) fn named(directory: &str) -> Option<&'static str> {
    let known = [
        (layout::EMPTY_DIR, "kubernetes.io/empty-dir"),
        (api::Kind::ConfigMap.plugin(), "kubernetes.io/configmap"),
        (api::Kind::Secret.plugin(), "kubernetes.io/secret"),
        (api::Kind::DownwardApi.plugin(), "kubernetes.io/downward-api"),
        (api::Kind::Projected.plugin(), "kubernetes.io/projected"),
    ];
    known.into_iter().find_map(|(escaped, name)| (escaped == directory).then_some(name))
}

/// Volumes that are set up, by pod; and where what happens to them is counted.
#[derive(Clone, Debug, Default)]
pub(super) struct ActualState {
    pods: Arc<Mutex<HashMap<String, Vec<MountedVolume>>>>,
    metrics: Option<Arc<Metrics>>,
}

#[derive(Debug)]
struct MountedVolume {
    volume: Box<str>,
    plugin: &'static str,
}

impl ActualState {
    pub(super) fn with_metrics(self, metrics: Arc<Metrics>) -> Self {
        Self { metrics: Some(metrics), ..self }
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<String, Vec<MountedVolume>>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, count: impl FnOnce(&Metrics)) {
        if let Some(metrics) = &self.metrics {
            count(metrics);
        }
    }

    /// A volume was set up, or brought up to date, or could not be.
    pub(super) fn mounted(&self, uid: &str, volume: &Volume, took: Duration, ok: bool) {
        let Some(plugin) = plugin_of(volume) else { return };
        self.count(|metrics| metrics.volumes.operation("volume_mount", plugin, took, ok));
        if ok {
            self.note(uid, &volume.name, plugin);
        }
    }

    /// A volume that is looked at again and again, and set up once.
    pub(super) fn mounted_once(&self, uid: &str, volume: &Volume, took: Duration, ok: bool) {
        if !ok || !self.holds(uid, &volume.name) {
            self.mounted(uid, volume, took, ok);
        }
    }

    fn holds(&self, uid: &str, volume: &str) -> bool {
        self.pods().get(uid).is_some_and(|entries| entries.iter().any(|entry| &*entry.volume == volume))
    }

    fn note(&self, uid: &str, volume: &str, plugin: &'static str) {
        let mut pods = self.pods();
        // Most pods are there already; only a new one costs a copy of its name.
        if !pods.contains_key(uid) {
            pods.insert(uid.to_owned(), Vec::new());
        }
        if let Some(entries) = pods.get_mut(uid)
            && entries.iter().all(|entry| &*entry.volume != volume)
        {
            entries.push(MountedVolume { volume: volume.into(), plugin });
        }
    }

    /// A directory of a volume was removed, or could not be. `directory` is its plugin's.
    pub(super) fn unmounted(&self, uid: &str, directory: &str, volume: &str, took: Duration, ok: bool) {
        let Some(plugin) = named(directory) else { return self.count(|metrics| metrics.volumes.forced(ok)) };
        self.count(|metrics| metrics.volumes.operation("volume_unmount", plugin, took, ok));
        if ok && let Some(entries) = self.pods().get_mut(uid) {
            entries.retain(|entry| &*entry.volume != volume);
        }
    }

    /// All of a pod's directories are gone. What was none, as host paths, is given up without work.
    pub(super) fn torn_down(&self, uid: &str) {
        for entry in self.pods().remove(uid).into_iter().flatten() {
            self.count(|metrics| metrics.volumes.operation("volume_unmount", entry.plugin, Duration::ZERO, true));
        }
    }

    /// Takes over what an earlier run has left in a pod's `volumes`.
    pub(super) fn reconstruct(&self, uid: &str, volumes: &Path) {
        for (directory, volume) in on_disk(volumes) {
            let plugin = named(&directory);
            self.count(|metrics| metrics.volumes.found(plugin.is_some()));
            plugin.into_iter().for_each(|plugin| self.note(uid, &volume, plugin));
        }
    }

    /// How many volumes of each plugin are set up.
    pub(super) fn totals(&self) -> BTreeMap<&'static str, usize> {
        let mut totals = BTreeMap::new();
        self.pods().values().flatten().for_each(|entry| *totals.entry(entry.plugin).or_default() += 1);
        totals
    }
}

/// Volumes in a pod's `volumes`: the plugin's directory and the volume's. Links and files are none. Types are read from
/// the listings: asking for a directory's own could wait for the server of a network file system.
fn on_disk(volumes: &Path) -> Vec<(String, String)> {
    let below = |dir: &Path| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect::<Vec<_>>()
    };
    let of_plugin = |directory: String| {
        let volumes = below(&volumes.join(&directory)).into_iter();
        volumes.map(move |volume| (directory.clone(), volume))
    };
    below(volumes).into_iter().flat_map(of_plugin).collect()
}
