//! The read-only port: pods, metrics and health, for whoever can reach it.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use k8s_openapi::api::core::v1::Pod;
use serde::Serialize;
use serde::ser::SerializeMap;
use tokio::time::Instant;

use super::Handles;
use super::checks::{Check, Wanted, overall, single};
use super::health::{line, not_found, text};
use super::spans;
use crate::metrics::{self, Metrics, TEXT_FORMAT};

/// Prefixes of what only the authenticated server has.
const DEBUG: [&str; 8] = [
    "/run/{*rest}",
    "/exec/{*rest}",
    "/attach/{*rest}",
    "/portForward/{*rest}",
    "/containerLogs/{*rest}",
    "/runningpods/{*rest}",
    "/debug/pprof/{*rest}",
    "/logs/{*rest}",
];

/// First segments that get a label of their own in `kubelet_http_*`.
const KNOWN: [&str; 10] =
    ["healthz", "pods", "stats", "run", "exec", "attach", "portForward", "containerLogs", "runningpods", "logs"];

#[derive(Clone)]
struct Reads {
    handles: Handles,
    sync_loop_limit: Duration,
}

pub(super) fn router(handles: Handles, sync_loop_limit: Duration) -> Router {
    let metrics = handles.metrics.clone();
    let mut router = Router::new()
        .route("/healthz", any(healthz))
        .route("/healthz/{name}", any(one_check))
        .route("/pods", any(pods))
        .route("/pods/", any(pods))
        .route("/metrics", any(exposition));
    for prefix in DEBUG {
        // The bare prefix belongs to it too, and the wildcard wants at least one character.
        let bare = prefix.trim_end_matches("{*rest}");
        router = router.route(prefix, any(disabled)).route(bare, any(disabled));
    }
    router
        .layer(middleware::from_fn_with_state(false, spans::spanned))
        .fallback(not_found)
        .with_state(Reads { handles, sync_loop_limit })
        .layer(middleware::from_fn_with_state(metrics, count))
}

impl Reads {
    fn checks(&self) -> [Check; 2] {
        let stuck = (self.handles.sync_loop_age)().is_some_and(|age| age > self.sync_loop_limit);
        let sync_loop = if stuck { Err("sync Loop took longer than expected".to_owned()) } else { Ok(()) };
        [Check { name: "ping", outcome: Ok(()) }, Check { name: "syncloop", outcome: sync_loop }]
    }
}

async fn healthz(State(reads): State<Reads>, Query(query): Query<Vec<(String, String)>>) -> Response {
    let wanted = Wanted::new(&query);
    let sensors = if wanted.verbose { (reads.handles.sensors)().iter().map(line).collect() } else { Vec::new() };
    text(overall(&reads.checks(), &wanted, &sensors))
}

async fn one_check(State(reads): State<Reads>, Path(name): Path<String>) -> Response {
    match reads.checks().iter().find(|check| check.name == name) {
        Some(check) => text(single(check)),
        None => not_found().await,
    }
}

async fn pods(State(reads): State<Reads>, method: Method, headers: HeaderMap) -> Response {
    if method != Method::GET {
        let allow = [(header::ALLOW, "GET")];
        return (StatusCode::METHOD_NOT_ALLOWED, allow, "405: Method Not Allowed").into_response();
    }
    if !accepts_json(&headers) {
        let body = "406: Not Acceptable\n\nAvailable representations: application/json";
        return (StatusCode::NOT_ACCEPTABLE, body).into_response();
    }
    match serde_json::to_vec(&PodList((reads.handles.pods)())) {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => text((StatusCode::INTERNAL_SERVER_ERROR, format!("cannot encode the pods: {error}\n"))),
    }
}

/// Accepted literally, as upstream's router does: `*/*` or the type itself, in the first header only.
fn accepts_json(headers: &HeaderMap) -> bool {
    let Some(accept) = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()) else { return true };
    let types = accept.split(',').map(|one| one.split(';').next().unwrap_or_default().trim());
    accept.is_empty() || types.into_iter().any(|one| one == "*/*" || one == "application/json")
}

/// A v1 PodList. Its items are plain: kind and version are the list's.
struct PodList(Vec<Arc<Pod>>);

impl Serialize for PodList {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut list = serializer.serialize_map(Some(4))?;
        list.serialize_entry("kind", "PodList")?;
        list.serialize_entry("apiVersion", "v1")?;
        list.serialize_entry("metadata", &serde_json::Map::new())?;
        let items: Vec<Item<'_>> = self.0.iter().map(|pod| Item(pod)).collect();
        // No pods are `null`, not an empty list.
        list.serialize_entry("items", &Some(items).filter(|items| !items.is_empty()))?;
        list.end()
    }
}

struct Item<'a>(&'a Pod);

impl Serialize for Item<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut item = serializer.serialize_map(None)?;
        item.serialize_entry("metadata", &self.0.metadata)?;
        item.serialize_entry("spec", &self.0.spec)?;
        item.serialize_entry("status", &self.0.status)?;
        item.end()
    }
}

async fn exposition(State(reads): State<Reads>) -> Response {
    (reads.handles.refresh)();
    let metrics = &reads.handles.metrics;
    match metrics.render() {
        Ok(body) => {
            let start = metrics.process_start.to_string();
            let content = [(header::CONTENT_TYPE, TEXT_FORMAT)];
            (content, [("process-start-time-unix", start)], body).into_response()
        }
        Err(error) => text((StatusCode::INTERNAL_SERVER_ERROR, format!("cannot encode the metrics: {error}\n"))),
    }
}

async fn disabled() -> Response {
    text((StatusCode::METHOD_NOT_ALLOWED, "Debug endpoints are disabled.\n".to_owned()))
}

/// Counts a request and its duration.
async fn count(State(metrics): State<Arc<Metrics>>, request: Request<Body>, next: Next) -> Response {
    let labels = labels(request.method(), request.uri().path());
    metrics.http.began(&labels);
    let guard = InFlight { metrics, labels, since: Instant::now() };
    let response = next.run(request).await;
    drop(guard);
    response
}

/// Ends the count also when the client goes away before the answer.
struct InFlight {
    metrics: Arc<Metrics>,
    labels: metrics::Request,
    since: Instant,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.metrics.http.ended(&self.labels, self.since.elapsed());
    }
}

fn labels(method: &Method, path: &str) -> metrics::Request {
    const METHODS: [&str; 8] = ["OPTIONS", "GET", "HEAD", "POST", "PUT", "DELETE", "TRACE", "CONNECT"];
    let mut segments = path.trim_start_matches('/').split('/');
    let (first, second) = (segments.next().unwrap_or_default(), segments.next());
    let path = match (first, second) {
        ("metrics", None | Some("")) => "metrics",
        ("metrics", Some("cadvisor")) => "metrics/cadvisor",
        ("metrics", Some("probes")) => "metrics/probes",
        ("metrics", Some("resource")) => "metrics/resource",
        ("debug", Some("pprof")) => "pprof",
        (first, _) => KNOWN.into_iter().find(|known| *known == first).unwrap_or("other"),
    };
    metrics::Request {
        method: METHODS.into_iter().find(|known| *known == method.as_str()).unwrap_or("other"),
        path,
        server: "readonly",
        long_running: matches!(path, "exec" | "attach"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_requests() {
        for (method, path, expected) in [
            ("GET", "/pods", ("GET", "pods", false)),
            ("GET", "/metrics/cadvisor", ("GET", "metrics/cadvisor", false)),
            ("GET", "/metrics/slis", ("GET", "other", false)),
            ("POST", "/exec/ns/pod/c", ("POST", "exec", true)),
            ("PATCH", "/", ("other", "other", false)),
            ("GET", "/nope", ("GET", "other", false)),
        ] {
            let labels = labels(&Method::from_bytes(method.as_bytes()).unwrap(), path);
            assert_eq!((labels.method, labels.path, labels.long_running), expected, "{method} {path}");
        }
    }

    #[test]
    fn acceptable_types() {
        let accepts = |accept: &str| accepts_json(&[(header::ACCEPT, accept.parse().unwrap())].into_iter().collect());
        for good in ["", "*/*", "application/json", "text/html, application/json;q=0.9"] {
            assert!(accepts(good), "{good}");
        }
        for bad in ["application/*", "text/html"] {
            assert!(!accepts(bad), "{bad}");
        }
        assert!(accepts_json(&HeaderMap::new()));
    }
}
