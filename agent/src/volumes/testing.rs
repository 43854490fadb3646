//! A scripted API server, nodes, devices and plugins for tests of volumes.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::sync::watch;

use super::VolumeError;
use super::Volumes;
use super::VolumesInUse;
use super::layout;
use super::plugin::Attributes;
use super::plugin::Plugins;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::teardown::VolumeOnDisk;
use crate::apiserver::recovery::Recovered;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::objects::Objects;
use crate::objects::ObjectsConfig;
use crate::objects::Strategy;

impl Volumes {
    /// As [`Self::make_pod_dirs`], on this thread.
    pub(super) fn make_pod_dirs_here(&self, uid: &str) {
        let made = self.dirs.pod(uid).and_then(|pod| layout::make_pod_dirs(&pod));
        made.expect("the pod's directories");
    }

    /// What a teardown of the pod's volumes that does not end would hold: all that is set up of them waits for it.
    pub(crate) async fn hold_teardown(&self, uid: &str) -> Box<dyn std::any::Any> {
        Box::new(self.in_progress.tear_down(uid).await)
    }
}

/// What is answered to GETs, by path.
pub(super) type Replies = Arc<Mutex<BTreeMap<String, Value>>>;

/// Patches that were sent: the path of each, and its body.
pub(super) type Patches = Arc<Mutex<Vec<(String, Value)>>>;

/// Objects of an API server that answers these, on a node `n1` with the label `zone=a`; and where the Node changes.
pub(super) fn objects(replies: &Replies) -> (Objects, watch::Sender<Option<Arc<Node>>>) {
    objects_by(replies, Strategy::default())
}

/// [`objects`], read in this way.
pub(super) fn objects_by(replies: &Replies, strategy: Strategy) -> (Objects, watch::Sender<Option<Arc<Node>>>) {
    answering(replies, strategy, Duration::ZERO, &Arc::default(), &Patches::default())
}

/// [`objects`], and the patches that are sent: they change nothing, and the reply to their path answers them.
pub(super) fn patched_objects(replies: &Replies) -> (Objects, Patches) {
    let patches = Patches::default();
    (answering(replies, Strategy::default(), Duration::ZERO, &Arc::default(), &patches).0, patches)
}

/// [`objects`] of a server that answers after this time, and how many requests for what it has were made.
pub(super) fn slow_objects(replies: &Replies, after: Duration) -> (Objects, Arc<AtomicUsize>) {
    let asked = Arc::default();
    (answering(replies, Strategy::default(), after, &asked, &Patches::default()).0, asked)
}

fn answering(
    replies: &Replies,
    strategy: Strategy,
    after: Duration,
    asked: &Arc<AtomicUsize>,
    patches: &Patches,
) -> (Objects, watch::Sender<Option<Arc<Node>>>) {
    let (replies, asked, patches) = (replies.clone(), asked.clone(), patches.clone());
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let reply = replies.lock().expect("unpoisoned").get(request.uri().path()).cloned();
        asked.fetch_add(usize::from(reply.is_some()), Ordering::Relaxed);
        let patches = patches.clone();
        async move {
            if request.method() == http::Method::PATCH {
                let path = request.uri().path().to_owned();
                let body = request.into_body().collect_bytes().await.expect("a body");
                let body = serde_json::from_slice(&body).expect("JSON");
                patches.lock().expect("unpoisoned").push((path, body));
            }
            tokio::time::sleep(after).await;
            let missing =
                json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": "no"});
            let code = if reply.is_some() { 200 } else { 404 };
            let body = Body::from(reply.unwrap_or(missing).to_string().into_bytes());
            Ok::<_, std::io::Error>(http::Response::builder().status(code).body(body).expect("valid"))
        }
    });
    let sender = watch::Sender::new(Some(Arc::new(node(json!({})))));
    let config = ObjectsConfig {
        strategy,
        recovered: Recovered::default(),
        sync_frequency: Duration::from_secs(60),
        clock: Clock::System,
        node: Some(sender.subscribe()),
    };
    (Objects::new(&kube::Client::new(service, "default"), config), sender)
}

/// The volumes of a node whose Node object, API server and clock are the test's.
pub(super) struct TestNode {
    pub(super) root: tempfile::TempDir,
    pub(super) replies: Replies,
    pub(super) node: watch::Sender<Option<Arc<Node>>>,
    pub(super) in_use: watch::Receiver<VolumesInUse>,
    pub(super) volumes: Volumes,
    pub(super) runtime: tokio::runtime::Runtime,
}

impl TestNode {
    /// `prepare` changes the volumes below a root directory before they have objects.
    pub(super) fn new(
        by_control_plane: bool,
        is_paused: bool,
        prepare: impl FnOnce(Volumes, &Path) -> Volumes,
    ) -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(is_paused).build().expect("a runtime");
        let (replies, sender) = (Replies::default(), watch::Sender::new(None));
        let in_use = sender.subscribe();
        let (objects, node) = runtime.block_on(async { objects(&replies) });
        let volumes = prepare(Volumes::new(root.path()).with_attachments(sender, by_control_plane), root.path());
        let volumes = volumes.with_objects(objects, BTreeMap::new());
        Self { root, replies, node, in_use, volumes, runtime }
    }

    /// Where the volumes count their operations from now on.
    pub(super) fn count_operations(&mut self) -> Arc<Metrics> {
        let metrics = Metrics::new();
        self.volumes = self.volumes.clone().with_metrics(metrics.clone());
        metrics
    }

    pub(super) fn set_up(&self, pod: &Pod) -> Result<(), String> {
        self.set_up_by(&self.volumes, pod)
    }

    pub(super) fn set_up_by(&self, volumes: &Volumes, pod: &Pod) -> Result<(), String> {
        let done = self.runtime.block_on(volumes.set_up(pod, None));
        done.map_err(|mut failed| failed.remove(0).to_string())
    }

    pub(super) fn tear_down(&self, volumes: &Volumes, uid: &str) -> Result<(), String> {
        self.runtime.block_on(volumes.tear_down(uid)).map_err(|error| error.to_string())
    }

    /// Releases what is unused; returns how many places that were.
    pub(super) fn release(&self, volumes: &Volumes) -> usize {
        let unused = self.runtime.block_on(volumes.unused()).expect("a list");
        for place in &unused {
            self.runtime.block_on(volumes.release_unused(place)).expect("released");
        }
        unused.len()
    }

    /// Volumes in use, as they are reported.
    pub(super) fn in_use(&self) -> BTreeSet<String> {
        self.in_use.borrow().clone().expect("reported")
    }
}

/// A pod that mounts this volume `v`.
pub(super) fn with_volume(uid: &str, volume: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {
            "securityContext": {"fsGroup": 77},
            "volumes": [volume],
            "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        },
    }))
    .expect("a pod")
}

/// [`with_volume`], of a source in this field of the volume. It is changed by these fields; a null removes one.
pub(super) fn with_source(uid: &str, field: &str, mut source: Value, change: &Value) -> Pod {
    source.as_object_mut().expect("an object").extend(change.as_object().expect("an object").clone());
    with_volume(uid, json!({"name": "v", field: source}))
}

/// A plugin of emptyDirs that waits for the test.
#[derive(Clone, Debug)]
pub(super) struct Gated {
    pub(super) refreshes: bool,
    /// One permit for each set-up.
    pub(super) set_ups: Arc<Semaphore>,
    /// One permit for each teardown.
    pub(super) teardowns: Arc<Semaphore>,
    /// The wait for a set-up is given up with the pod.
    pub(super) gives_up: bool,
}

impl Default for Gated {
    fn default() -> Self {
        let [set_ups, teardowns] = [(), ()].map(|()| Arc::new(Semaphore::new(0)));
        Self { refreshes: true, set_ups, teardowns, gives_up: false }
    }
}

async fn take(permits: &Semaphore) -> Result<(), VolumeError> {
    permits.acquire().await.expect("open").forget();
    Ok(())
}

impl Gated {
    /// Volumes below `root` of this plugin.
    pub(super) fn volumes(&self, root: &Path) -> Volumes {
        let mut volumes = Volumes::new(root);
        volumes.plugins = Plugins::only(self.clone());
        volumes
    }
}

impl VolumePlugin for Gated {
    fn name(&self) -> &'static str {
        "kubernetes.io/empty-dir"
    }

    fn supports(&self, volume: &Volume) -> bool {
        volume.empty_dir.is_some()
    }

    fn attributes(&self) -> Attributes {
        Attributes { refreshes: self.refreshes, ..Attributes::default() }
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        Box::pin(async move {
            match self.gives_up {
                true => target.unless_over(take(&self.set_ups)).await?,
                false => take(&self.set_ups).await?,
            }
            Ok(Ready::default())
        })
    }

    fn tear_down<'a>(&'a self, _volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        Box::pin(take(&self.teardowns))
    }
}

/// Volumes below `root` whose emptyDirs are never torn down.
pub(crate) fn never_torn_down(root: &Path) -> Volumes {
    Gated::default().volumes(root)
}

/// The node with this status.
pub(super) fn node(status: Value) -> Node {
    let node = json!({"metadata": {"name": "n1", "labels": {"zone": "a"}}, "status": status});
    serde_json::from_value(node).expect("a node")
}

/// A loop device on a file, detached when this is dropped.
pub(super) struct LoopDevice(pub(super) PathBuf);

impl LoopDevice {
    pub(super) fn on(file: &Path, bytes: u64) -> Self {
        fs::File::create(file).and_then(|file| file.set_len(bytes)).expect("a file");
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().expect("losetup");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Self(String::from_utf8_lossy(&made.stdout).trim().into())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("--detach").arg(&self.0).status();
        assert!(detached.is_ok_and(|status| status.success()), "{} stays", self.0.display());
    }
}
