//! For tests: runs the sources and follows what they deliver.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::SourcesConfig;
use super::SourcesHandle;
use super::adoption::Adoptions;
use super::start;
use crate::model::Clock;
use crate::model::Pod;
use crate::model::PodUpdate;
use crate::recorder::Recorder;

/// Long enough for the busiest machine, and never waited for when all is well.
const DEADLINE: Duration = Duration::from_secs(20);

/// The receiving end, with what follows from the updates so far.
pub(super) struct Watcher {
    updates: mpsc::Receiver<PodUpdate>,
    pub handle: SourcesHandle,
    /// Pods by name.
    pub pods: BTreeMap<String, Pod>,
    /// Kinds of updates so far: "add web-n", "remove web-n", ...
    pub log: Vec<String>,
    pub cancel: CancellationToken,
    _tasks: JoinSet<()>,
}

/// A configuration without sources.
pub(super) fn config() -> SourcesConfig {
    SourcesConfig {
        static_pod_path: None,
        // Only events cause scans.
        file_check_frequency: Duration::from_secs(3600),
        static_pod_url: None,
        static_pod_url_headers: vec![],
        http_check_frequency: Duration::from_secs(3600),
        node_name: "n".into(),
        prevent_static_pod_api_references: true,
        adoptions: Adoptions::default(),
        api: None,
    }
}

/// A manifest of one pod.
pub(super) fn manifest(name: &str, image: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers:\n  - {{name: c, image: \"{image}\"}}\n"
    )
}

impl Watcher {
    pub(super) fn start(config: SourcesConfig) -> Self {
        let cancel = CancellationToken::new();
        let mut tasks = JoinSet::new();
        let (updates, handle) = start(config, Clock::System, Recorder::default(), &mut tasks, cancel.clone());
        Self { updates, handle, pods: BTreeMap::new(), log: Vec::new(), cancel, _tasks: tasks }
    }

    /// Takes in one update.
    pub(super) async fn update(&mut self) {
        self.update_after(|_| ()).await;
    }

    /// Takes in one update; what `read` finds when it has arrived, as the sync loop sees it.
    pub(super) async fn update_after<T>(&mut self, read: impl FnOnce(&SourcesHandle) -> T) -> T {
        let update = tokio::time::timeout(DEADLINE, self.updates.recv()).await;
        let update = update.unwrap_or_else(|_| panic!("no update in {DEADLINE:?}; so far {:?}", self.log));
        let (kind, source, pods) = match update.expect("the stream is open") {
            PodUpdate::Add(source, pods) => ("add", source, pods),
            PodUpdate::Update(source, pods) => ("update", source, pods),
            PodUpdate::Delete(source, pods) => ("delete", source, pods),
            PodUpdate::Remove(source, pods) => ("remove", source, pods),
            PodUpdate::Reconcile(source, pods) => ("reconcile", source, pods),
            PodUpdate::Undecodable(..) => panic!("only the API source has such pods"),
        };
        let found = read(&self.handle);
        self.handle.mark_seen(source);
        if pods.is_empty() {
            self.log.push(kind.to_owned());
        }
        for pod in pods {
            let name = pod.metadata.name.clone().expect("a name");
            self.log.push(format!("{kind} {name}"));
            if kind == "remove" {
                self.pods.remove(&name);
            } else {
                self.pods.insert(name, pod);
            }
        }
        found
    }

    /// name=image of every pod.
    pub(super) fn images(&self) -> Vec<String> {
        let image = |pod: &Pod| pod.spec.as_ref().and_then(|s| s.containers[0].image.clone()).unwrap_or_default();
        self.pods.iter().map(|(name, pod)| format!("{name}={}", image(pod))).collect()
    }

    /// Takes in updates until the pods are these.
    pub(super) async fn until<const N: usize>(&mut self, images: [&str; N]) {
        let end = Instant::now() + DEADLINE;
        while self.images() != images {
            assert!(Instant::now() < end, "not {images:?} but {:?} after {:?}", self.images(), self.log);
            self.update().await;
        }
    }

    /// Waits for the end of the stream.
    pub(super) async fn closed(&mut self) {
        while self.updates.recv().await.is_some() {}
    }

    /// Takes the log since the last call.
    pub(super) fn take_log(&mut self) -> Vec<String> {
        std::mem::take(&mut self.log)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}
