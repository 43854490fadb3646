//! Mirror pods against an API server that records its requests.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use serde_json::json;
use tracing::Level;

use super::*;
use crate::metrics::Metrics;
use crate::model::PodRef;
use crate::model::testing::LogCount;
use crate::recorder::testing::listening;
use crate::status::manager::Answer;

#[derive(Default)]
struct Api {
    calls: Mutex<Vec<String>>,
    failures: Mutex<VecDeque<PodApiError>>,
    panics_once: AtomicBool,
}

impl Api {
    async fn call<T>(&self, what: String, answer: T) -> Result<T, PodApiError> {
        self.calls.lock().unwrap().push(what);
        assert!(!self.panics_once.swap(false, Relaxed), "this test makes the call panic");
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

fn terminating(mut pod: ApiPod) -> ApiPod {
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
    let show = MirrorAction::Ensure(static_pod("h"));
    let create = || Call::Create(Box::new(mirror_pod(&static_pod("h"), &node())));
    let mut leaving = (*node()).clone();
    leaving.metadata.deletion_timestamp = Some(crate::model::testing::time(Duration::ZERO));
    let table: [(&MirrorAction, Option<ApiPod>, &Node, Call); 10] = [
        (&show, None, &node(), create()),
        (&show, None, &leaving, Call::Nothing),
        (&show, Some(mirror("h", "m")), &node(), Call::Nothing),
        (&show, Some(mirror("other", "m")), &node(), Call::Delete(reference("m"))),
        (&show, Some(terminating(mirror("h", "m"))), &node(), Call::Delete(reference("m"))),
        (&MirrorAction::Keep, None, &node(), Call::Nothing),
        (&MirrorAction::Keep, Some(mirror("other", "m")), &node(), Call::Nothing),
        (&MirrorAction::Keep, Some(terminating(mirror("h", "m"))), &node(), Call::Delete(reference("m"))),
        (&MirrorAction::Delete, None, &node(), Call::Nothing),
        (&MirrorAction::Delete, Some(mirror("h", "m")), &node(), Call::Delete(reference("m"))),
    ];
    for (action, mirror, node, expected) in table {
        assert_eq!(next_call(action, mirror.as_ref(), node), expected, "{action:?} {:?}", mirror.map(|m| m.metadata));
    }
}

struct Setup {
    api: Arc<Api>,
    mirrors: Mirrors,
    node: watch::Sender<Option<Arc<Node>>>,
}

fn setup(own: Option<Arc<Node>>) -> Setup {
    let (node, receiver) = watch::channel(own);
    let (api, retries) = (Arc::new(Api::default()), RetryTracker::new(Recorder::default(), None));
    Setup { mirrors: Mirrors::new(api.clone(), receiver, retries), api, node }
}

impl Setup {
    fn reconcile(&mut self, action: &MirrorAction, shown: Option<&ApiPod>) {
        self.mirrors.reconcile("web-node_default", action, shown.map(|pod| Arc::new(pod.clone())).as_ref());
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_before_the_own_node_is_known() {
    let mut setup = setup(None);
    let show = MirrorAction::Ensure(static_pod("h"));
    setup.reconcile(&show, None);
    setup.node.send_replace(Some(node()));
    assert_eq!(setup.mirrors.changed().await, None, "all names must be reconciled");
    setup.reconcile(&show, None);
    assert_eq!(setup.mirrors.changed().await.as_deref(), Some("web-node_default"));
    assert_eq!(setup.api.calls(), ["create h"]);
}

#[tokio::test(start_paused = true)]
async fn one_is_made_once_although_the_watch_lags() {
    let mut setup = setup(Some(node()));
    let show = MirrorAction::Ensure(static_pod("h"));
    for _ in 0..3 {
        setup.reconcile(&show, None);
    }
    setup.mirrors.changed().await;
    setup.reconcile(&show, None);
    setup.reconcile(&show, Some(&mirror("h", "made")));
    assert_eq!(setup.api.calls(), ["create h"]);
}

#[tokio::test(start_paused = true)]
async fn another_content_deletes_and_makes_at_once() {
    let mut setup = setup(Some(node()));
    let show = MirrorAction::Ensure(static_pod("new"));
    let old = mirror("old", "m");
    setup.reconcile(&show, Some(&old));
    setup.mirrors.changed().await;
    setup.reconcile(&show, Some(&old));
    setup.mirrors.changed().await;
    setup.reconcile(&show, Some(&old));
    assert_eq!(setup.api.calls(), ["delete m", "create new"], "the watch still shows the old one");
}

#[tokio::test(start_paused = true)]
async fn one_just_made_is_deleted_once_when_its_pod_changes() {
    let mut setup = setup(Some(node()));
    setup.reconcile(&MirrorAction::Ensure(static_pod("old")), None);
    setup.mirrors.changed().await;
    let made = mirror("old", "made");
    for _ in 0..2 {
        setup.reconcile(&MirrorAction::Ensure(static_pod("new")), Some(&made));
        setup.mirrors.changed().await;
    }
    assert_eq!(setup.api.calls(), ["create old", "delete made", "create new"]);
}

#[tokio::test(start_paused = true)]
async fn one_that_was_deleted_is_made_again() {
    let mut setup = setup(Some(node()));
    let show = MirrorAction::Ensure(static_pod("h"));
    setup.reconcile(&show, None);
    setup.mirrors.changed().await;
    let made = mirror("h", "made");
    setup.reconcile(&show, Some(&made));
    setup.mirrors.removed(&made);
    setup.reconcile(&show, None);
    setup.mirrors.changed().await;
    assert_eq!(setup.api.calls(), ["create h", "create h"]);
}

#[tokio::test(start_paused = true)]
async fn failures_are_retried() {
    let mut setup = setup(Some(node()));
    let show = MirrorAction::Ensure(static_pod("h"));
    let lost = || PodApiError::Unanswered("lost".into());
    setup.api.failures.lock().unwrap().extend([lost(), PodApiError::Conflict("exists".into()), lost()]);
    let began = Instant::now();
    setup.reconcile(&show, None);
    while setup.api.calls().len() < 4 {
        setup.mirrors.changed().await;
        setup.reconcile(&show, None);
    }
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    setup.reconcile(&show, None);
    assert_eq!(setup.api.calls(), ["create h"; 4]);
}

/// As by an admission policy.
#[tokio::test(start_paused = true)]
async fn a_mirror_pod_that_is_always_refused_is_retried_with_growing_pauses_and_reported() {
    let warned = LogCount::start("keblet::retry", Level::WARN);
    let ((recorder, mut events), metrics) = (listening(), Metrics::new());
    let mut setup = setup(Some(node()));
    setup.mirrors.retries = RetryTracker::new(recorder, Some(metrics.clone()));
    let refused = PodApiError::Refused("403 by a policy".into());
    setup.api.failures.lock().unwrap().extend(vec![refused; 1000]);
    let (show, began) = (MirrorAction::Ensure(static_pod("h")), Instant::now());
    while began.elapsed() < Duration::from_secs(300) {
        setup.reconcile(&show, None);
        setup.mirrors.changed().await;
    }
    // 6 to 10 s of short pauses, then one in 6.4 to 9.6 s.
    let calls = setup.api.calls().len();
    assert!((34..=54).contains(&calls), "{calls} calls in five minutes");
    assert_eq!(warned.lines(), 1);
    let sent = events.take();
    assert_eq!(sent.len(), 1, "{sent:?}");
    let is_stuck = sent[0].starts_with("node W OperationStuck: sync_mirror_pod of web-node_default has failed for 3 ");
    assert!(is_stuck && sent[0].ends_with("refused: 403 by a policy"), "{sent:?}");
    let shows = |line: &str| metrics.render().expect("metrics").lines().any(|shown| shown == line);
    assert!(shows("keblet_stuck_operations{operation=\"sync_mirror_pod\"} 1"));
    assert!(shows(&format!("keblet_retries_total{{operation=\"sync_mirror_pod\"}} {calls}")));

    // The static pod is removed.
    for _ in 0..3 {
        setup.reconcile(&MirrorAction::Delete, None);
        let _ = tokio::time::timeout(Duration::from_secs(20), setup.mirrors.changed()).await;
    }
    assert!(shows("keblet_stuck_operations{operation=\"sync_mirror_pod\"} 0"));
    assert!(setup.mirrors.names.is_empty(), "nothing is remembered of it");
}

#[tokio::test(start_paused = true)]
async fn a_call_that_panics_is_retried() {
    let mut setup = setup(Some(node()));
    setup.api.panics_once.store(true, Relaxed);
    let show = MirrorAction::Ensure(static_pod("h"));
    setup.reconcile(&show, None);
    for _ in 0..2 {
        let changed = tokio::time::timeout(Duration::from_secs(5), setup.mirrors.changed()).await;
        assert_eq!(changed.expect("a failure, then the end of its pause").as_deref(), Some("web-node_default"));
        setup.reconcile(&show, None);
    }
    assert_eq!(setup.mirrors.changed().await.as_deref(), Some("web-node_default"));
    assert_eq!(setup.api.calls(), ["create h"; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_mirror_that_is_gone_already_counts_as_deleted() {
    let mut setup = setup(Some(node()));
    setup.api.failures.lock().unwrap().extend([PodApiError::NotFound]);
    setup.reconcile(&MirrorAction::Delete, Some(&mirror("h", "m")));
    setup.mirrors.changed().await;
    setup.reconcile(&MirrorAction::Delete, Some(&mirror("h", "m")));
    setup.mirrors.removed(&mirror("h", "m"));
    setup.reconcile(&MirrorAction::Delete, None);
    assert_eq!(setup.api.calls(), ["delete m"]);
    assert!(setup.mirrors.names.is_empty(), "nothing is remembered of it");
}

#[tokio::test(start_paused = true)]
async fn no_record_is_kept_of_a_mirror_whose_deletion_the_watch_reports_first() {
    let mut setup = setup(Some(node()));
    setup.reconcile(&MirrorAction::Delete, Some(&mirror("h", "m")));
    setup.mirrors.removed(&mirror("h", "m"));
    setup.reconcile(&MirrorAction::Delete, None);
    setup.mirrors.changed().await;
    setup.reconcile(&MirrorAction::Delete, None);
    assert_eq!(setup.api.calls(), ["delete m"]);
    assert!(setup.mirrors.names.is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_time_in_which_a_mirror_has_to_appear_ends_no_pause_after_a_failure() {
    let mut setup = setup(Some(node()));
    setup.reconcile(&MirrorAction::Ensure(static_pod("old")), None);
    setup.mirrors.changed().await;
    tokio::time::sleep(SHOWN_LIMIT - Duration::from_secs(1)).await;
    setup.mirrors.names.get_mut("web-node_default").expect("it was made").failures = 10;
    setup.api.failures.lock().unwrap().push_back(PodApiError::Unanswered("lost".into()));
    let made = mirror("old", "made");
    setup.reconcile(&MirrorAction::Ensure(static_pod("new")), Some(&made));
    setup.mirrors.changed().await;
    let began = Instant::now();
    setup.mirrors.changed().await;
    assert!(began.elapsed() >= retry_after(11, 1.0), "{:?}", began.elapsed());
    setup.reconcile(&MirrorAction::Ensure(static_pod("new")), Some(&made));
    setup.mirrors.changed().await;
    assert_eq!(setup.api.calls(), ["create old", "delete made", "delete made"]);
}
