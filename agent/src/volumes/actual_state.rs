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

use tokio::time::Instant;

use super::VolumeError;
use super::plugin::Plugins;
use crate::metrics::Metrics;

/// Undoes the map of a raw device for a pod.
pub(super) const UNMAP_VOLUME: &str = "unmap_volume";

/// Volumes that are set up, by pod; and where what happens to them is counted.
#[derive(Clone, Debug, Default)]
pub(super) struct ActualState {
    pods: Arc<Mutex<HashMap<String, MountedVolumes>>>,
    /// When volumes that could not be set up yet were first requested, by pod and their name in it.
    requested: Arc<Mutex<HashMap<String, HashMap<String, Instant>>>>,
    metrics: Option<Arc<Metrics>>,
}

/// A pod's volumes by plugin and name: one of its own and a persistent volume that it claims may have the same name. Whether
/// this process has set it up; of one that it found on disk it is not known whether it is complete.
type MountedVolumes = BTreeMap<&'static str, BTreeMap<Box<str>, bool>>;

impl ActualState {
    pub(super) fn with_metrics(self, metrics: Arc<Metrics>) -> Self {
        Self { metrics: Some(metrics), ..self }
    }

    fn pods(&self) -> MutexGuard<'_, HashMap<String, MountedVolumes>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, count: impl FnOnce(&Metrics)) {
        if let Some(metrics) = &self.metrics {
            count(metrics);
        }
    }

    /// An attempt to set up the pod's volume of this name has ended. How long ago it was requested, or the first attempt if
    /// those before this one have failed.
    pub(super) fn attempted(&self, uid: &str, name: &str, requested: Instant, ok: bool) -> Duration {
        // As with the pods.
        let mut all = self.requested.lock().unwrap_or_else(PoisonError::into_inner);
        let earlier = all.get(uid).and_then(|of_pod| of_pod.get(name)).copied();
        let first = earlier.unwrap_or(requested);
        if !ok {
            all.entry(uid.to_owned()).or_default().insert(name.to_owned(), first);
        } else if earlier.is_some()
            && let Some(of_pod) = all.get_mut(uid)
        {
            of_pod.remove(name);
        }
        first.elapsed()
    }

    /// Removes the times at which volumes of a pod were requested.
    pub(super) fn forget_requests(&self, uid: &str) {
        self.requested.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }

    /// A file system of this plugin was mounted, so long after it was requested.
    pub(super) fn mounted_after(&self, plugin: &str, waited: Duration) {
        self.count(|metrics| metrics.volumes.mounted_after(plugin, waited));
    }

    /// An operation on a volume of this plugin has ended. `name`: as upstream calls it.
    pub(super) fn operation(&self, name: &'static str, plugin: &str, took: Duration, ok: bool) {
        self.count(|metrics| metrics.volumes.operation(name, plugin, took, ok));
    }

    /// Times an operation, as [`Self::operation`], unless it returns that there was nothing to do.
    ///
    /// # Errors
    /// That of the operation.
    pub(super) async fn timed(
        &self,
        name: &'static str,
        plugin: &str,
        work: impl Future<Output = Result<bool, VolumeError>>,
    ) -> Result<(), VolumeError> {
        let began = Instant::now();
        let done = work.await;
        if !matches!(done, Ok(false)) {
            self.operation(name, plugin, began.elapsed(), done.is_ok());
        }
        done.map(|_| ())
    }

    /// A volume of this plugin, which may refresh it, was set up or refreshed, or could not be, by the operation of this name.
    /// One that does not refresh is counted the first time only: every pass checks it. True if it was counted.
    pub(super) fn mounted(
        &self,
        uid: &str,
        volume: &str,
        (plugin, refreshes): (&'static str, bool),
        operation: &'static str,
        took: Duration,
        ok: bool,
    ) -> bool {
        if ok && !refreshes && self.holds(uid, plugin, volume) {
            self.add(uid, volume, plugin, true);
            return false;
        }
        self.operation(operation, plugin, took, ok);
        if ok {
            self.add(uid, volume, plugin, true);
        }
        true
    }

    /// True if this process has set the volume up. `backing`: its plugin and its name.
    pub(super) fn is_set_up(&self, uid: &str, (plugin, volume): &(&'static str, String)) -> bool {
        self.completeness(uid, plugin, volume) == Some(true)
    }

    fn holds(&self, uid: &str, plugin: &str, volume: &str) -> bool {
        self.completeness(uid, plugin, volume).is_some()
    }

    fn completeness(&self, uid: &str, plugin: &str, volume: &str) -> Option<bool> {
        self.pods().get(uid)?.get(plugin)?.get(volume).copied()
    }

    fn add(&self, uid: &str, volume: &str, plugin: &'static str, is_complete: bool) {
        let mut pods = self.pods();
        // Most pods are there already; only a new one costs a copy of its name.
        if !pods.contains_key(uid) {
            pods.insert(uid.to_owned(), MountedVolumes::new());
        }
        let Some(volumes) = pods.get_mut(uid) else { return };
        let of_plugin = volumes.entry(plugin).or_default();
        match of_plugin.get_mut(volume) {
            Some(known) => *known |= is_complete,
            None => drop(of_plugin.insert(volume.into(), is_complete)),
        }
    }

    /// A volume on disk was torn down, or could not be. `plugin`: its plugin's name, if this agent has it.
    pub(super) fn unmounted(&self, uid: &str, plugin: Option<&'static str>, volume: &str, took: Duration, ok: bool) {
        let Some(plugin) = plugin else { return self.count(|metrics| metrics.volumes.forced(ok)) };
        self.operation("volume_unmount", plugin, took, ok);
        if ok {
            self.remove(uid, plugin, volume);
        }
    }

    /// A device was unmapped, or could not be.
    pub(super) fn unmapped(&self, uid: &str, plugin: &str, volume: &str, took: Duration, ok: bool) {
        self.operation(UNMAP_VOLUME, plugin, took, ok);
        if ok {
            self.remove(uid, plugin, volume);
        }
    }

    /// Nothing is left of a volume.
    pub(super) fn remove(&self, uid: &str, plugin: &str, volume: &str) {
        if let Some(of_plugin) = self.pods().get_mut(uid).and_then(|volumes| volumes.get_mut(plugin)) {
            of_plugin.remove(volume);
        }
    }

    /// A pod has no directories of volumes any more. Volumes without one, as host paths, count as unmounted.
    pub(super) fn torn_down(&self, uid: &str) {
        let volumes = self.pods().remove(uid).unwrap_or_default();
        for plugin in volumes.iter().flat_map(|(plugin, of_plugin)| of_plugin.iter().map(move |_| *plugin)) {
            self.operation("volume_unmount", plugin, Duration::ZERO, true);
        }
    }

    /// Adds the volumes that another process left in a pod's `volumes`.
    pub(super) fn reconstruct(&self, uid: &str, volumes: &Path, plugins: &Plugins) {
        for (directory, volume) in on_disk(volumes) {
            let plugin = plugins.of_directory(&directory);
            self.count(|metrics| metrics.volumes.found(plugin.is_some()));
            plugin.into_iter().for_each(|(_, name)| self.add(uid, &volume, name, false));
        }
    }

    /// How many volumes of each plugin are set up.
    pub(super) fn totals(&self) -> BTreeMap<&'static str, usize> {
        let mut totals = BTreeMap::new();
        for (plugin, of_plugin) in self.pods().values().flatten().filter(|(_, of_plugin)| !of_plugin.is_empty()) {
            *totals.entry(*plugin).or_default() += of_plugin.len();
        }
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
