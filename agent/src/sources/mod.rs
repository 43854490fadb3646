//! Desired pods: static pod folder or file, static pod URL, API server, merged into one ordered stream of updates.
//!
//! ```text
//!  file (inotify, 20 s look) ─┐
//!  http (polled) ─────────────┤  complete sets        PodUpdate, bounded,
//!  api (watched) ─────────────┴────────▶ merger ────────── blocking ──────▶ sync loop
//!                            and changes   │                                   │ mark_seen
//!                                          └── delivered ──▶ SourcesHandle ◀───┘
//! ```
//!
//! One task per source, one merger. A full channel blocks the merger, and with it every source: no update is ever
//! dropped. This module decides what is desired, never what becomes of it; it starts and stops no container.

mod api;
pub mod decode;
mod defaults;
mod documents;
pub mod field;
mod file;
mod hash;
pub mod hostile;
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
use crate::apiserver::recovery::Recovered;
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
    /// Feature gate PreventStaticPodAPIReferences.
    pub prevent_static_pod_api_references: bool,
    /// The API server whose pods of this node are run, and what ends the waits for it; `None` on a standalone node.
    pub api: Option<(kube::Client, Recovered)>,
}

/// What a source has to say.
#[derive(Clone, Debug)]
pub enum News {
    /// All pods it wants. Whatever it wanted before and is not here is no longer wanted.
    Set(Vec<Pod>),
    /// What is different since its last news. Only after a set.
    Change {
        /// New and changed pods.
        there: Vec<Pod>,
        /// UIDs of pods that are gone.
        gone: Vec<String>,
    },
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
            node_name: config.node_name.clone(),
            prevent_api_references: config.prevent_static_pod_api_references,
        };
        tokio::spawn(http.run(sets.clone(), cancel.clone()));
    }
    if let Some((client, recovered)) = config.api {
        sources.push(ConfigSource::Api);
        let api = api::ApiSource { client, recovered, node_name: config.node_name };
        tokio::spawn(api.run(sets.clone(), cancel.clone()));
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
    _keeps_channel_open: mpsc::Sender<(ConfigSource, News)>,
}

impl Merger {
    async fn run(self, mut sets: mpsc::Receiver<(ConfigSource, News)>, updates: mpsc::Sender<PodUpdate>) {
        let mut maps: HashMap<ConfigSource, merge::PodMap> = HashMap::new();
        loop {
            let (source, news) = tokio::select! {
                () = updates.closed() => return,
                set = sets.recv() => match set {
                    Some(news) => news,
                    None => return,
                },
            };
            let (map, now) = (maps.entry(source).or_default(), self.clock.wall());
            let steps = match news {
                News::Set(set) => merge::merge(map, source, set, now),
                News::Change { there, gone } => merge::change(map, source, there, &gone, now),
            };
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
