//! An API server that hangs, and a pod with a token of it: its container restarts, and the pod ends, all the same.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
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
use keblet_tests::node::shortage::until_true;
use keblet_tests::node::until;
use kube::client::Body;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::sleep;

use crate::housekeeping::paused;

/// Seconds for which tokens are issued.
const LIFETIME: u64 = 600;

/// An API server that issues tokens until it hangs.
#[derive(Clone)]
struct Server {
    clock: SimClock,
    hangs: Arc<AtomicBool>,
}

impl Server {
    fn new(sim: &SimRuntime) -> Self {
        Self { clock: sim.clock(), hangs: Arc::default() }
    }

    fn hang(&self) {
        self.hangs.store(true, Ordering::Relaxed);
    }

    fn objects(&self) -> Objects {
        let server = self.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (server, is_token) = (server.clone(), request.uri().path().ends_with("/token"));
            async move { server.answer(is_token).await }
        });
        let config = ObjectsConfig {
            strategy: Strategy::default(),
            recovered: Recovered::default(),
            sync_frequency: Duration::from_secs(60),
            clock: Clock::Derived { origin: self.clock.wall(self.clock.start()), start: self.clock.start() },
            node: None,
        };
        Objects::new(&kube::Client::new(service, "default"), config)
    }

    async fn answer(&self, is_token: bool) -> Result<http::Response<Body>, http::Error> {
        if self.hangs.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        let expires = Timestamp::try_from(self.clock.now() + Duration::from_secs(LIFETIME)).expect("in range");
        let (code, answer) = match is_token {
            true => (
                201_u16,
                json!({ "metadata": {}, "spec": { "audiences": [], "expirationSeconds": LIFETIME },
                    "status": { "token": "secret", "expirationTimestamp": expires.to_string() } }),
            ),
            false => (404, json!({ "kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound" })),
        };
        http::Response::builder().status(code).body(Body::from(answer.to_string().into_bytes()))
    }
}

/// A pod with a token.
fn web() -> Pod {
    let mut object = serde_json::to_value(&*pod("web").running("main", "run").build()).expect("a pod");
    object["spec"]["serviceAccountName"] = json!("default");
    object["spec"]["volumes"] = json!([{ "name": "token", "projected": { "defaultMode": 420,
        "sources": [{ "serviceAccountToken": { "path": "token", "expirationSeconds": LIFETIME } }] } }]);
    object["spec"]["containers"][0]["volumeMounts"] = json!([{ "name": "token", "mountPath": "/token" }]);
    Arc::new(serde_json::from_value(object).expect("a pod"))
}

fn started(trace: &Trace) -> usize {
    trace.history("web", "main").filter(|instance| instance.started.is_some()).count()
}

#[test]
fn an_expired_token_delays_no_restart_of_a_container() {
    paused(async || {
        let (sim, folder) = node();
        let server = Server::new(&sim);
        let _agent = Agent::start_with_objects(&sim, folder.path(), vec![web()], server.objects());
        until(&sim, "it runs", |trace| started(trace) == 1).await;
        server.hang();
        for restarts in 1..=2 {
            // Long enough to end the back-off of the last restart, too.
            sleep(Duration::from_secs(2 * LIFETIME)).await;
            sim.kill("web", "main", Exit::Code(1)).expect("it runs");
            let exited = Instant::now();
            until(&sim, "it is restarted", move |trace| started(trace) > restarts).await;
            assert!(exited.elapsed() < Duration::from_secs(3), "restart {restarts} after {:?}", exited.elapsed());
        }
        let token = folder.path().join("pods/web-uid/volumes/kubernetes.io~projected/token/token");
        assert_eq!(std::fs::read_to_string(token).expect("a token"), "secret", "the volume keeps its content");
    });
}

/// As after a restart of the agent: its first token is waited for longer than any other.
#[test]
fn a_pod_whose_volumes_are_being_refreshed_ends_at_once() {
    paused(async || {
        let (sim, folder) = node();
        let server = Server::new(&sim);
        let agent = Agent::start_with_objects(&sim, folder.path(), vec![web()], server.objects());
        until(&sim, "it runs", |trace| started(trace) == 1).await;
        sleep(Duration::from_secs(10)).await;
        drop(agent);
        server.hang();
        let agent = Agent::start_with_objects(&sim, folder.path(), vec![web()], server.objects());
        sleep(Duration::from_secs(10)).await;
        let removed = Instant::now();
        agent.remove(web()).await;
        until(&sim, "it is stopped", |trace| trace.live("web", "main").is_none()).await;
        assert!(removed.elapsed() < Duration::from_secs(5), "{:?}", removed.elapsed());
        let directory = folder.path().join("pods/web-uid");
        until_true("nothing is left of it", || !directory.exists()).await;
        assert!(removed.elapsed() < Duration::from_secs(15), "{:?}", removed.elapsed());
        assert_eq!(sim.trace(started), 1);
    });
}
