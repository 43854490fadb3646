//! A claim that is bound long after its pod has reached the node.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;

use keblet::apiserver::recovery::Recovered;
use keblet::model::Clock;
use keblet::model::Pod;
use keblet::objects::Objects;
use keblet::objects::ObjectsConfig;
use keblet::objects::Strategy;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::until;
use kube::client::Body;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::sleep;

use crate::housekeeping::paused;

/// An API server with a claim, and the persistent volume that it is bound to if `is_bound`.
fn objects(sim: &SimRuntime, is_bound: Arc<AtomicBool>) -> Objects {
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let (code, answer) = answer(request.uri().path(), is_bound.load(Ordering::Relaxed));
        let response = http::Response::builder().status(code).body(Body::from(answer.to_string().into_bytes()));
        std::future::ready(response)
    });
    let clock = sim.clock();
    let config = ObjectsConfig {
        strategy: Strategy::default(),
        recovered: Recovered::default(),
        sync_frequency: Duration::from_secs(60),
        clock: Clock::Derived { origin: clock.wall(clock.start()), start: clock.start() },
        node: None,
    };
    Objects::new(&kube::Client::new(service, "default"), config)
}

fn answer(path: &str, is_bound: bool) -> (u16, Value) {
    let phase = if is_bound { "Bound" } else { "Pending" };
    match path {
        "/api/v1/namespaces/default/persistentvolumeclaims/data" => (
            200,
            json!({ "metadata": { "name": "data", "namespace": "default", "uid": "c-1" },
                "spec": { "volumeName": "pv" }, "status": { "phase": phase } }),
        ),
        "/api/v1/persistentvolumes/pv" => (
            200,
            json!({ "metadata": { "name": "pv" },
                "spec": { "hostPath": { "path": "/data" }, "claimRef": { "uid": "c-1" } } }),
        ),
        _ => (404, json!({ "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound" })),
    }
}

/// A pod with a volume of the claim.
fn web() -> Pod {
    let mut object = serde_json::to_value(&*pod("web").running("main", "run").build()).expect("a pod");
    object["spec"]["volumes"] = json!([{ "name": "data", "persistentVolumeClaim": { "claimName": "data" } }]);
    object["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "data", "mountPath": "/data" }]);
    Arc::new(serde_json::from_value(object).expect("a pod"))
}

fn started(trace: &Trace) -> usize {
    trace.history("web", "main").filter(|instance| instance.started.is_some()).count()
}

#[test]
fn a_claim_that_is_bound_late_is_noticed_within_seconds() {
    paused(async || {
        let (sim, folder) = node();
        let is_bound = Arc::<AtomicBool>::default();
        let _agent = Agent::start_with_objects(&sim, folder.path(), vec![web()], objects(&sim, is_bound.clone()));
        sleep(Duration::from_secs(500)).await;
        assert_eq!(sim.trace(started), 0, "its claim is not bound");
        is_bound.store(true, Ordering::Relaxed);
        let bound = Instant::now();
        until(&sim, "it runs", |trace| started(trace) == 1).await;
        assert!(bound.elapsed() < Duration::from_secs(12), "{:?}", bound.elapsed());
    });
}
