//! Desired pods: static pod folder or file, static pod URL, API server, merged into one ordered stream of updates.
//!
//! ```text
//!  file (inotify, 20 s scan) ─┐
//!  http (polled) ─────────────┤  complete sets        PodUpdate, bounded,
//!  api (watched) ─────────────┴────────▶ merger ────────── blocking ──────▶ sync loop
//!                            and changes   │                                   │ mark_seen
//!                                          └── delivered ──▶ SourcesHandle ◀───┘
//! ```
//!
//! One task per source, one merger. A full channel blocks the merger, and with it every source: no update is ever
//! dropped. This module decides which pods are desired; it starts and stops no container.

pub mod adoption;
mod api;
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
#[cfg(test)]
mod start_tests;
pub mod static_pod;
#[cfg(test)]
mod test_watcher;
#[cfg(test)]
mod tests;
pub mod validate;

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;
use std::time::SystemTime;

use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::adoption::Adoptions;
pub use self::ready::SourcesHandle;
use crate::apiserver::recovery::Recovered;
use crate::model::Clock;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::model::PodUpdate;
use crate::model::named;
use crate::proxy::Proxies;
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
    /// Static pods from files that the runtime has already.
    pub adoptions: Adoptions,
    /// The pods bound to this node; `None` on a standalone node.
    pub api: Option<ApiPods>,
}

/// Access to the pods that are bound to this node.
#[derive(Clone)]
pub struct ApiPods {
    /// Client with access to pods of all namespaces.
    pub client: kube::Client,
    /// Signals that the API server is reachable again; ends back-off waits.
    pub recovered: Recovered,
    /// True once admission has the Node, or it is certain that there is none. No pod is delivered before: one that is
    /// rejected by an earlier state of the Node stays rejected.
    pub node_known: watch::Receiver<bool>,
}

/// What a source sends to the merger.
#[derive(Clone, Debug)]
pub enum SourceUpdate {
    /// The complete set of pods: earlier pods that are not in it are removed.
    Set(Vec<Pod>),
    /// As a set, of a source that may have more pods: it has delivered only with the next complete set.
    Incomplete(Vec<Pod>),
    /// As a set, of which some pods cannot be decoded.
    List {
        /// The pods that can be.
        pods: Vec<Pod>,
        /// UIDs of the others: those that are known stay as they are.
        kept: Vec<String>,
    },
    /// The difference to the state after the last update. Only after a set.
    Change {
        /// New and changed pods.
        changed: Vec<Pod>,
        /// UIDs of removed pods.
        removed: Vec<String>,
    },
}

/// Starts the configured sources. Their tasks are spawned into `tasks`, which is to be watched: without one of them desired
/// pods change unnoticed. They end when `cancel` is cancelled or the receiver is dropped.
pub fn start(
    config: SourcesConfig,
    clock: Clock,
    recorder: Recorder,
    tasks: &mut JoinSet<()>,
    cancel: CancellationToken,
) -> (mpsc::Receiver<PodUpdate>, SourcesHandle) {
    let (sets, merger_sets) = mpsc::channel(1);
    let (updates, receiver) = mpsc::channel(CAPACITY);
    let configured = [
        (config.static_pod_path.is_some(), ConfigSource::File),
        (config.static_pod_url.is_some(), ConfigSource::Http),
        (config.api.is_some(), ConfigSource::Api),
    ];
    let configured = configured.into_iter().filter(|(is_set, _)| *is_set).map(|(_, source)| source);
    let handle = SourcesHandle::new(configured.collect());
    if let Some(path) = config.static_pod_path {
        let awaits_mirrors = config.api.is_some() && config.adoptions.any_runs();
        let file = file::FileSource {
            path,
            check_frequency: config.file_check_frequency,
            node_name: config.node_name.clone(),
            prevent_api_references: config.prevent_static_pod_api_references,
            adoptions: config.adoptions,
            after: awaits_mirrors.then(|| handle.clone()),
        };
        tasks.spawn(named("pod source file", file.run(sets.clone(), cancel.clone())));
    }
    if let Some(url) = config.static_pod_url {
        let http = http::HttpSource {
            url,
            headers: config.static_pod_url_headers,
            check_frequency: config.http_check_frequency,
            node_name: config.node_name.clone(),
            prevent_api_references: config.prevent_static_pod_api_references,
            proxies: Proxies::from_env(),
        };
        tasks.spawn(named("pod source http", http.run(sets.clone(), cancel.clone())));
    }
    if let Some(pods) = config.api {
        let api = api::ApiSource { pods, node_name: config.node_name };
        tasks.spawn(named("pod source api", api.run(sets.clone(), cancel.clone())));
    }
    let merger = Merger { handle: handle.clone(), clock, recorder, _keeps_channel_open: sets };
    let merging = async move {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = merger.run(merger_sets, updates) => {}
        }
    };
    tasks.spawn(named("merger of pod sources", merging));
    (receiver, handle)
}

/// Brings `map` up to date.
fn apply(map: &mut merge::PodMap, source: ConfigSource, update: SourceUpdate, now: SystemTime) -> merge::MergeResult {
    match update {
        SourceUpdate::Set(set) => merge::merge(map, source, set, now),
        SourceUpdate::Incomplete(set) => {
            let merged = merge::merge(map, source, set, now);
            map.await_set();
            merged
        }
        SourceUpdate::List { mut pods, kept } => {
            // Before the first list is complete, as what no source has is removed then; else after what is decoded by now.
            let (is_first, undecodable) = (map.is_unmerged(), map.keep_undecodable(&kept));
            pods.extend(map.known(&kept));
            let merged = merge::merge(map, source, pods, now);
            if is_first { merged.preceded_by(undecodable) } else { merged.followed_by(undecodable) }
        }
        SourceUpdate::Change { changed, removed } => {
            let uids = changed.iter().filter_map(|pod| pod.metadata.uid.as_ref());
            let undecodable = map.decoded(uids.chain(&removed));
            merge::change(map, source, changed, &removed, now).followed_by(undecodable)
        }
    }
}

struct Merger {
    handle: SourcesHandle,
    clock: Clock,
    recorder: Recorder,
    /// Without any source the stream of updates stays open and silent.
    _keeps_channel_open: mpsc::Sender<(ConfigSource, SourceUpdate)>,
}

impl Merger {
    async fn run(self, mut sets: mpsc::Receiver<(ConfigSource, SourceUpdate)>, updates: mpsc::Sender<PodUpdate>) {
        let mut maps: HashMap<ConfigSource, merge::PodMap> = HashMap::new();
        loop {
            let (source, update) = tokio::select! {
                () = updates.closed() => return,
                set = sets.recv() => match set {
                    Some(update) => update,
                    None => return,
                },
            };
            let (map, now) = (maps.entry(source).or_default(), self.clock.wall());
            let is_complete = !matches!(update, SourceUpdate::Incomplete(_));
            let result = apply(map, source, update, now);
            result.duplicates.iter().for_each(|pod| self.duplicate(source, pod));
            // Delivered means merged: the loop may see the update before this task runs again.
            if is_complete {
                self.handle.mark_delivered(source);
            }
            for update in result.updates {
                if !is_complete {
                    self.handle.mark_incomplete(source);
                }
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
