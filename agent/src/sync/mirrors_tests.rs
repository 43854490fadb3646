//! Mirror pods against an API server that remembers what it was asked for.

use std::collections::VecDeque;
use std::sync::Mutex;

use serde_json::json;
use tokio::time::Instant;

use super::*;
use crate::model::PodRef;
use crate::status::manager::Answer;

#[derive(Default)]
struct Api {
    calls: Mutex<Vec<String>>,
    failures: Mutex<VecDeque<PodApiError>>,
}

impl Api {
    async fn call<T>(&self, what: String, answer: T) -> Result<T, PodApiError> {
        self.calls.lock().unwrap().push(what);
        match self.failures.lock().unwrap().pop_front() {
            Some(failure) => Err(failure),
            None => Ok(answer),
        }
    }

    fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }
}

impl PodApi for Api {
    fn get<'a>(&'a self, pod: &'a PodRef) -> Answer<'a, ApiPod> {
        Box::pin(self.call(format!("get {pod}"), ApiPod::default()))
    }

    fn patch_status<'a>(&'a self, pod: &'a PodRef, _patch: &'a serde_json::Value) -> Answer<'a, ApiPod> {
        Box::pin(self.call(format!("patch {pod}"), ApiPod::default()))
    }

    fn delete<'a>(&'a self, pod: &'a PodRef) -> Answer<'a, ()> {
        Box::pin(self.call(format!("delete {}", pod.uid), ()))
    }

    fn create<'a>(&'a self, pod: &'a ApiPod) -> Answer<'a, ApiPod> {
        let mut made = pod.clone();
        made.metadata.uid = Some("made".into());
        let hash = made.metadata.annotations.as_ref().and_then(|a| a.get(CONFIG_MIRROR)).cloned().unwrap_or_default();
        Box::pin(self.call(format!("create {hash}"), made))
    }
}

fn node() -> Arc<Node> {
    Arc::new(serde_json::from_value(json!({"metadata": {"name": "node", "uid": "node-uid"}})).unwrap())
}

fn static_pod(hash: &str) -> Pod {
    let annotations = json!({CONFIG_HASH: hash, "kubernetes.io/config.source": "file"});
    let metadata = json!({"name": "web-node", "namespace": "default", "uid": hash, "annotations": annotations});
    Arc::new(serde_json::from_value(json!({"metadata": metadata, "status": {"phase": "Pending"}})).unwrap())
}

fn mirror(hash: &str, uid: &str) -> ApiPod {
    let mut pod = mirror_pod(&static_pod(hash), &node());
    pod.metadata.uid = Some(uid.to_owned());
    pod
}

fn ending(mut pod: ApiPod) -> ApiPod {
    pod.metadata.deletion_timestamp = Some(crate::model::testing::time(Duration::ZERO));
    pod
}

fn reference(uid: &str) -> PodRef {
    pod_ref(&mirror("h", uid))
}

#[test]
fn a_mirror_is_the_pod_with_its_hash_and_its_owner() {
    let mirror = mirror_pod(&static_pod("h1"), &node());
    let expected = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": "web-node", "namespace": "default",
            "annotations": {CONFIG_HASH: "h1", CONFIG_MIRROR: "h1", "kubernetes.io/config.source": "file"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "node", "uid": "node-uid", "controller": true}],
        },
    });
    assert_eq!(serde_json::to_value(&mirror).unwrap(), expected);
}

#[test]
fn what_is_due() {
    let show = Wish::Show(static_pod("h"));
    let create = || Due::Create(Box::new(mirror_pod(&static_pod("h"), &node())));
    let mut leaving = (*node()).clone();
    leaving.metadata.deletion_timestamp = Some(crate::model::testing::time(Duration::ZERO));
    let table: [(&Wish, Option<ApiPod>, &Node, Due); 10] = [
        (&show, None, &node(), create()),
        (&show, None, &leaving, Due::Nothing),
        (&show, Some(mirror("h", "m")), &node(), Due::Nothing),
        (&show, Some(mirror("other", "m")), &node(), Due::Delete(reference("m"))),
        (&show, Some(ending(mirror("h", "m"))), &node(), Due::Delete(reference("m"))),
        (&Wish::Leave, None, &node(), Due::Nothing),
        (&Wish::Leave, Some(mirror("other", "m")), &node(), Due::Nothing),
        (&Wish::Leave, Some(ending(mirror("h", "m"))), &node(), Due::Delete(reference("m"))),
        (&Wish::Gone, None, &node(), Due::Nothing),
        (&Wish::Gone, Some(mirror("h", "m")), &node(), Due::Delete(reference("m"))),
    ];
    for (wish, mirror, node, expected) in table {
        assert_eq!(due(wish, mirror.as_ref(), node), expected, "{wish:?} {:?}", mirror.map(|m| m.metadata));
    }
}

struct Site {
    api: Arc<Api>,
    mirrors: Mirrors,
    node: watch::Sender<Option<Arc<Node>>>,
}

fn site(own: Option<Arc<Node>>) -> Site {
    let (node, receiver) = watch::channel(own);
    let api = Arc::new(Api::default());
    Site { mirrors: Mirrors::new(api.clone(), receiver), api, node }
}

impl Site {
    fn keep(&mut self, wish: &Wish, shown: Option<&ApiPod>) {
        self.mirrors.keep("web-node_default", wish, shown.map(|pod| Arc::new(pod.clone())).as_ref());
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_before_the_own_node_is_known() {
    let mut site = site(None);
    let show = Wish::Show(static_pod("h"));
    site.keep(&show, None);
    site.node.send_replace(Some(node()));
    assert_eq!(site.mirrors.news().await, None, "all names are to be looked at");
    site.keep(&show, None);
    assert_eq!(site.mirrors.news().await.as_deref(), Some("web-node_default"));
    assert_eq!(site.api.calls(), ["create h"]);
}

#[tokio::test(start_paused = true)]
async fn one_is_made_once_although_the_watch_lags() {
    let mut site = site(Some(node()));
    let show = Wish::Show(static_pod("h"));
    for _ in 0..3 {
        site.keep(&show, None);
    }
    site.mirrors.news().await;
    site.keep(&show, None);
    site.keep(&show, Some(&mirror("h", "made")));
    assert_eq!(site.api.calls(), ["create h"]);
}

#[tokio::test(start_paused = true)]
async fn another_content_deletes_and_makes_at_once() {
    let mut site = site(Some(node()));
    let show = Wish::Show(static_pod("new"));
    let old = mirror("old", "m");
    site.keep(&show, Some(&old));
    site.mirrors.news().await;
    site.keep(&show, Some(&old));
    site.mirrors.news().await;
    site.keep(&show, Some(&old));
    assert_eq!(site.api.calls(), ["delete m", "create new"], "the watch still shows the old one");
}

#[tokio::test(start_paused = true)]
async fn one_just_made_is_deleted_once_when_its_pod_changes() {
    let mut site = site(Some(node()));
    site.keep(&Wish::Show(static_pod("old")), None);
    site.mirrors.news().await;
    let made = mirror("old", "made");
    for _ in 0..2 {
        site.keep(&Wish::Show(static_pod("new")), Some(&made));
        site.mirrors.news().await;
    }
    assert_eq!(site.api.calls(), ["create old", "delete made", "create new"]);
}

#[tokio::test(start_paused = true)]
async fn one_that_was_deleted_is_made_again() {
    let mut site = site(Some(node()));
    let show = Wish::Show(static_pod("h"));
    site.keep(&show, None);
    site.mirrors.news().await;
    let made = mirror("h", "made");
    site.keep(&show, Some(&made));
    site.mirrors.vanished(&made);
    site.keep(&show, None);
    site.mirrors.news().await;
    assert_eq!(site.api.calls(), ["create h", "create h"]);
}

#[tokio::test(start_paused = true)]
async fn failures_are_retried() {
    let mut site = site(Some(node()));
    let show = Wish::Show(static_pod("h"));
    let lost = || PodApiError::Unanswered("lost".into());
    site.api.failures.lock().unwrap().extend([lost(), PodApiError::Conflict("exists".into()), lost()]);
    let began = Instant::now();
    site.keep(&show, None);
    while site.api.calls().len() < 4 {
        site.mirrors.news().await;
        site.keep(&show, None);
    }
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    site.keep(&show, None);
    assert_eq!(site.api.calls(), ["create h"; 4]);
}

#[tokio::test(start_paused = true)]
async fn a_mirror_that_is_gone_already_counts_as_deleted() {
    let mut site = site(Some(node()));
    site.api.failures.lock().unwrap().extend([PodApiError::NotFound]);
    site.keep(&Wish::Gone, Some(&mirror("h", "m")));
    site.mirrors.news().await;
    site.keep(&Wish::Gone, Some(&mirror("h", "m")));
    site.mirrors.vanished(&mirror("h", "m"));
    site.keep(&Wish::Gone, None);
    assert_eq!(site.api.calls(), ["delete m"]);
    assert!(site.mirrors.names.is_empty(), "nothing is remembered of it");
}
