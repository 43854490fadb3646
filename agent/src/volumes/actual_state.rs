//! The actual state of the world: volumes that this process has set up, and those it found on disk when it started.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use super::plugin::Plugins;
use crate::metrics::Metrics;

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
    /// This process has set it up. Of one that it found on disk it is not known whether it is complete.
    is_complete: bool,
}

impl MountedVolume {
    /// A pod's volume and a persistent volume that it claims may have the same name.
    fn is(&self, plugin: &str, volume: &str) -> bool {
        self.plugin == plugin && &*self.volume == volume
    }
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

    /// A volume of this plugin, which may refresh it, was set up or refreshed, or could not be. One that does not refresh is
    /// counted the first time only: every pass checks it.
    pub(super) fn mounted(
        &self,
        uid: &str,
        volume: &str,
        (plugin, refreshes): (&'static str, bool),
        took: Duration,
        ok: bool,
    ) {
        if ok && !refreshes && self.holds(uid, plugin, volume) {
            self.add(uid, volume, plugin, true);
            return;
        }
        self.count(|metrics| metrics.volumes.operation("volume_mount", plugin, took, ok));
        if ok {
            self.add(uid, volume, plugin, true);
        }
    }

    /// True if this process has set the volume up. `backing`: its plugin and its name.
    pub(super) fn is_set_up(&self, uid: &str, (plugin, volume): &(&'static str, String)) -> bool {
        let is_it = |entry: &MountedVolume| entry.is(plugin, volume) && entry.is_complete;
        self.pods().get(uid).is_some_and(|entries| entries.iter().any(is_it))
    }

    fn holds(&self, uid: &str, plugin: &str, volume: &str) -> bool {
        self.pods().get(uid).is_some_and(|entries| entries.iter().any(|entry| entry.is(plugin, volume)))
    }

    fn add(&self, uid: &str, volume: &str, plugin: &'static str, is_complete: bool) {
        let mut pods = self.pods();
        // Most pods are there already; only a new one costs a copy of its name.
        if !pods.contains_key(uid) {
            pods.insert(uid.to_owned(), Vec::new());
        }
        let Some(entries) = pods.get_mut(uid) else { return };
        match entries.iter_mut().find(|entry| entry.is(plugin, volume)) {
            Some(entry) => entry.is_complete |= is_complete,
            None => entries.push(MountedVolume { volume: volume.into(), plugin, is_complete }),
        }
    }

    /// A volume on disk was torn down, or could not be. `plugin`: its plugin's name, if this agent has it.
    pub(super) fn unmounted(&self, uid: &str, plugin: Option<&'static str>, volume: &str, took: Duration, ok: bool) {
        let Some(plugin) = plugin else { return self.count(|metrics| metrics.volumes.forced(ok)) };
        self.count(|metrics| metrics.volumes.operation("volume_unmount", plugin, took, ok));
        if ok && let Some(entries) = self.pods().get_mut(uid) {
            entries.retain(|entry| !entry.is(plugin, volume));
        }
    }

    /// A pod has no directories of volumes any more. Volumes without one, as host paths, count as unmounted.
    pub(super) fn torn_down(&self, uid: &str) {
        for entry in self.pods().remove(uid).into_iter().flatten() {
            self.count(|metrics| metrics.volumes.operation("volume_unmount", entry.plugin, Duration::ZERO, true));
        }
    }

    /// Adds the volumes that another process left in a pod's `volumes`.
    pub(super) fn reconstruct(&self, uid: &str, volumes: &Path, plugins: &Plugins) {
        for (directory, volume) in on_disk(volumes) {
            let plugin = plugins.of_directory(&directory);
            self.count(|metrics| metrics.volumes.found(plugin.is_some()));
            plugin.into_iter().for_each(|plugin| self.add(uid, &volume, plugin.name(), false));
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
