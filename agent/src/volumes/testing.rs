//! A scripted API server and devices for tests of volumes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;
use tokio::sync::watch;

use crate::apiserver::recovery::Recovered;
use crate::model::Clock;
use crate::objects::Objects;
use crate::objects::ObjectsConfig;
use crate::objects::Strategy;

/// What is answered to GETs, by path.
pub(super) type Replies = Arc<Mutex<BTreeMap<String, Value>>>;

/// Objects of an API server that answers these, on a node `n1` with the label `zone=a`; and where the Node changes.
pub(super) fn objects(replies: &Replies) -> (Objects, watch::Sender<Option<Arc<Node>>>) {
    objects_by(replies, Strategy::default())
}

/// [`objects`], read in this way.
pub(super) fn objects_by(replies: &Replies, strategy: Strategy) -> (Objects, watch::Sender<Option<Arc<Node>>>) {
    let replies = replies.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let reply = replies.lock().expect("unpoisoned").get(request.uri().path()).cloned();
        async move {
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
