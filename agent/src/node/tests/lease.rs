//! The Lease and its times.

use http::Method;
use serde_json::json;
use tracing::Level;

use super::server::LEASE;
use super::server::NODE;
use super::*;
use crate::model::testing::LogCount;

const PUT: &str = "PUT /apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n";
const POST: &str = "POST /apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";
const GET: &str = "GET /apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n";

struct LeaseHarness {
    server: Server,
    cache: NodeCache,
    _running: DropGuard,
}

impl LeaseHarness {
    fn start() -> Self {
        let (server, cache, shutdown) = (Server::default(), NodeCache::default(), CancellationToken::new());
        let clock = Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
        let keeper =
            LeaseController::new(config(|_| {}), server.client(), cache.clone(), clock, Arc::new(AtomicUsize::new(0)));
        tokio::spawn(keeper.run(shutdown.clone()));
        Self { server, cache, _running: shutdown.drop_guard() }
    }

    fn node_appears(&self) {
        self.server.put(NODE, json!({ "metadata": { "name": "n", "uid": "u" } }));
        self.cache.offer(serde_json::from_value(self.server.get(NODE)).expect("a node"));
    }

    fn renewed(&self) -> String {
        self.server.get(LEASE)["spec"]["renewTime"].as_str().unwrap_or_default().to_owned()
    }
}

#[tokio::test(start_paused = true)]
async fn is_created_with_the_node_and_renewed_every_quarter_of_its_duration() {
    let keeper = LeaseHarness::start();
    pass(Duration::from_secs(5)).await;
    assert_eq!(keeper.server.calls(), [""; 0], "there is no Node");
    keeper.node_appears();
    pass(Duration::from_millis(100)).await;
    assert_eq!(keeper.server.calls(), [GET, POST]);
    let lease = keeper.server.get(LEASE);
    assert_eq!(lease["spec"]["holderIdentity"], "n");
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 40);
    let owner = json!([{ "apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u" }]);
    assert_eq!(lease["metadata"]["ownerReferences"], owner);
    let first = keeper.renewed();
    pass(Duration::from_secs(60)).await;
    let calls = keeper.server.calls();
    assert!(calls.iter().all(|call| call == PUT) && (5..=6).contains(&calls.len()), "{calls:?}");
    assert!(keeper.renewed() > first);
}

#[tokio::test(start_paused = true)]
async fn survives_writes_and_deletions_by_others() {
    let keeper = LeaseHarness::start();
    keeper.node_appears();
    pass(Duration::from_millis(100)).await;
    let mut lease = keeper.server.get(LEASE);
    lease["metadata"]["labels"] = json!({ "theirs": "kept" });
    keeper.server.put(LEASE, lease);
    keeper.server.asked();
    pass(Duration::from_secs(11)).await;
    assert_eq!(keeper.server.calls(), [PUT, GET, PUT], "a conflict, then with the fresh one");
    assert_eq!(keeper.server.get(LEASE)["metadata"]["labels"]["theirs"], "kept");
    keeper.server.delete(LEASE);
    pass(Duration::from_secs(11)).await;
    assert_ne!(keeper.server.get(LEASE), json!(null), "created again");
}

#[tokio::test(start_paused = true)]
async fn is_renewed_after_failures() {
    let keeper = LeaseHarness::start();
    keeper.node_appears();
    pass(Duration::from_millis(100)).await;
    keeper.server.asked();
    for _ in 0..7 {
        keeper.server.fail(Method::PUT, Some(500));
    }
    keeper.server.fail(Method::GET, Some(503));
    let before = keeper.renewed();
    pass(Duration::from_secs(11)).await;
    let calls = keeper.server.calls();
    assert_eq!(calls[..7], [PUT, PUT, PUT, PUT, PUT, GET, GET], "five tries, then what is there");
    assert!(keeper.renewed() > before);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_that_lasts_is_logged_once() {
    let warned = LogCount::start("keblet::node::call", Level::WARN);
    let keeper = LeaseHarness::start();
    keeper.node_appears();
    pass(Duration::from_millis(100)).await;
    for _ in 0..100 {
        keeper.server.fail(Method::PUT, Some(403));
    }
    keeper.server.asked();
    pass(Duration::from_secs(50)).await;
    assert!(keeper.server.calls().len() > 20, "it is tried again");
    assert_eq!(warned.lines(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_cannot_be_decoded_is_renewed() {
    let keeper = LeaseHarness::start();
    let owner = json!({ "apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u" });
    let metadata = json!({ "name": "n", "labels": { "theirs": "kept" }, "ownerReferences": [owner] });
    let spec = json!({ "holderIdentity": "n", "acquireTime": "9999-12-31T23:59:59.000000Z" });
    keeper.server.put(LEASE, json!({ "metadata": metadata, "spec": spec }));
    keeper.node_appears();
    pass(Duration::from_millis(100)).await;
    assert_eq!(keeper.server.calls(), [GET, GET, PUT], "the second for the metadata alone");
    let lease = keeper.server.get(LEASE);
    assert_eq!(lease["metadata"]["labels"]["theirs"], "kept");
    assert_eq!((&lease["spec"]["holderIdentity"], &lease["spec"]["acquireTime"]), (&json!("n"), &json!(null)));
    assert!(!keeper.renewed().is_empty());
    pass(Duration::from_secs(11)).await;
    assert_eq!(keeper.server.calls(), [PUT]);
}

#[tokio::test(start_paused = true)]
async fn an_existing_lease_is_adopted() {
    let keeper = LeaseHarness::start();
    keeper
        .server
        .put(LEASE, json!({ "metadata": { "name": "n" }, "spec": { "holderIdentity": "n", "leaseTransitions": 3 } }));
    keeper.node_appears();
    pass(Duration::from_millis(100)).await;
    assert_eq!(keeper.server.calls(), [GET, PUT]);
    let lease = keeper.server.get(LEASE);
    assert_eq!(lease["spec"]["leaseTransitions"], 3);
    assert_eq!(lease["metadata"]["ownerReferences"][0]["uid"], "u");
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_created_although_the_node_cannot_be_decoded() {
    let keeper = LeaseHarness::start();
    let taint = json!({ "key": "k", "effect": "NoSchedule", "timeAdded": "9999-12-31T23:59:59Z" });
    keeper.server.put(NODE, json!({ "metadata": { "name": "n", "uid": "u" }, "spec": { "taints": [taint] } }));
    pass(Duration::from_secs(11)).await;
    assert_eq!(keeper.server.calls(), [GET, "GET /api/v1/nodes/n", POST], "the cache has no Node");
    assert_eq!(keeper.server.get(LEASE)["metadata"]["ownerReferences"][0]["uid"], "u");
}

/// The node lifecycle controller ignores renewals that are not later than the last one.
#[tokio::test(start_paused = true)]
async fn the_time_of_renewals_never_goes_back() {
    let keeper = LeaseHarness::start();
    let before = "2099-01-01T00:00:00.000000Z";
    let spec = json!({ "holderIdentity": "n", "leaseDurationSeconds": 40, "renewTime": before });
    keeper.server.put(LEASE, json!({ "metadata": { "name": "n" }, "spec": spec }));
    keeper.node_appears();
    pass(Duration::from_millis(100)).await;
    let first = keeper.renewed();
    assert!(first.as_str() > before, "{first}");
    pass(Duration::from_secs(11)).await;
    assert!(keeper.renewed() > first, "{}", keeper.renewed());
}
