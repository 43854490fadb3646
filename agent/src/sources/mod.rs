//! Desired pods: static pod folder or file, static pod URL, merged into one ordered stream of updates.
//!
//! ```text
//!  file (inotify, 20 s look) ─┐  complete sets        PodUpdate, bounded,
//!  http (polled) ─────────────┴────────▶ merger ────────── blocking ──────▶ sync loop
//!                                          │                                   │ mark_seen
//!                                          └── delivered ──▶ SourcesHandle ◀───┘
//! ```
//!
//! One task per source, one merger. A full channel blocks the merger, and with it every source: no update is ever
//! dropped. This module decides what is desired, never what becomes of it; it starts and stops no container.

pub mod decode;
mod defaults;
mod documents;
pub mod field;
mod file;
mod hash;
mod http;
pub mod merge;
#[cfg(test)]
mod merge_tests;
mod ready;
mod references;
pub mod static_pod;
#[cfg(test)]
mod test_watcher;
#[cfg(test)]
mod tests;
pub mod validate;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub use self::ready::SourcesHandle;
use crate::model::Clock;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::model::PodUpdate;
use crate::recorder::EventType;
use crate::recorder::Recorder;

/// Updates that may wait for the sync loop.
const CAPACITY: usize = 50;

/// What to read desired pods from.
#[derive(Clone)]
pub struct SourcesConfig {
    /// `staticPodPath`: a folder of manifests or a single one.
    pub static_pod_path: Option<PathBuf>,
    /// `fileCheckFrequency`.
    pub file_check_frequency: Duration,
    /// `staticPodURL`.
    pub static_pod_url: Option<String>,
    /// `staticPodURLHeader`: name and values. Never logged.
    pub static_pod_url_headers: Vec<(String, Vec<String>)>,
    /// `httpCheckFrequency`.
    pub http_check_frequency: Duration,
    /// This node's name.
    pub node_name: String,
    /// Gate PreventStaticPodAPIReferences.
    pub prevent_static_pod_api_references: bool,
}

/// Starts the configured sources. The tasks end when `cancel` is cancelled or the receiver is dropped.
pub fn start(
    config: SourcesConfig,
    clock: Clock,
    recorder: Recorder,
    cancel: CancellationToken,
) -> (mpsc::Receiver<PodUpdate>, SourcesHandle) {
    let (sets, merger_sets) = mpsc::channel(1);
    let (updates, receiver) = mpsc::channel(CAPACITY);
    let mut sources = Vec::new();
    if let Some(path) = config.static_pod_path {
        sources.push(ConfigSource::File);
        let file = file::FileSource {
            path,
            check_frequency: config.file_check_frequency,
            node_name: config.node_name.clone(),
            prevent_api_references: config.prevent_static_pod_api_references,
        };
        tokio::spawn(file.run(sets.clone(), cancel.clone()));
    }
    if let Some(url) = config.static_pod_url {
        sources.push(ConfigSource::Http);
        let http = http::HttpSource {
            url,
            headers: config.static_pod_url_headers,
            check_frequency: config.http_check_frequency,
            node_name: config.node_name,
            prevent_api_references: config.prevent_static_pod_api_references,
        };
        tokio::spawn(http.run(sets.clone(), cancel.clone()));
    }
    let handle = SourcesHandle::new(sources);
    let merger = Merger { handle: handle.clone(), clock, recorder, _keeps_channel_open: sets };
    tokio::spawn(async move {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = merger.run(merger_sets, updates) => {}
        }
    });
    (receiver, handle)
}

struct Merger {
    handle: SourcesHandle,
    clock: Clock,
    recorder: Recorder,
    /// Without any source the stream of updates stays open and silent.
    _keeps_channel_open: mpsc::Sender<(ConfigSource, Vec<Pod>)>,
}

impl Merger {
    async fn run(self, mut sets: mpsc::Receiver<(ConfigSource, Vec<Pod>)>, updates: mpsc::Sender<PodUpdate>) {
        let mut maps: HashMap<ConfigSource, merge::PodMap> = HashMap::new();
        loop {
            let (source, set) = tokio::select! {
                () = updates.closed() => return,
                set = sets.recv() => match set {
                    Some(set) => set,
                    None => return,
                },
            };
            let steps = merge::merge(maps.entry(source).or_default(), source, set, self.clock.wall());
            steps.duplicates.iter().for_each(|pod| self.duplicate(source, pod));
            // Delivered means merged: the loop may see the update before this task runs again.
            self.handle.mark_delivered(source);
            for update in steps.updates {
                if updates.send(update).await.is_err() {
                    return;
                }
            }
        }
    }

    fn duplicate(&self, source: ConfigSource, pod: &Pod) {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let source = source.as_str();
        let message = format!(
            "Error validating pod {name}_{namespace}({uid}) from {source} due to duplicate pod name {name:?}, ignoring"
        );
        self.recorder.pod_event(pod, "", EventType::Warning, "FailedValidation", &message);
    }
}
