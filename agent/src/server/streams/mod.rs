//! Interactive streams and commands: `/exec`, `/attach`, `/portForward`, `/run`, `/checkpoint`.
//!
//! Finds the container or sandbox, requests a stream from the runtime, and proxies its bytes; clients were authorized
//! before. Data is interpreted only for WebSocket protocols that runtimes do not support ([`session`]).
//!
//! ```text
//!  client ══ upgraded connection ══▶ proxy ══ upgraded connection ══▶ streaming server of the runtime
//!                                      ▲
//!            find ─▶ runtime: Exec, Attach, PortForward ─▶ URL
//! ```

mod backend;
mod commands;
mod find;
mod params;
mod proxy;
mod refusal;
mod session;
mod spdy;
mod status;
#[cfg(test)]
mod tests;
mod translate;
mod websocket;

use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::extract::RawPathParams;
use axum::extract::Request;
use axum::extract::State;
use axum::handler::Handler;
use axum::response::Response;
use axum::routing::any;
use keblet_proto::cri::v1 as cri;

use self::backend::BackendError;
use self::params::Streams;
use self::refusal::Refusal;
use super::answer;
use super::containers::Containers;
use crate::metrics::Metrics;
use crate::metrics::Subresource;
use crate::model::pod_ref;
use crate::model::quote::go_quoted;

#[derive(Clone)]
struct Handles {
    containers: Containers,
    /// The directory of checkpoints; `None` while the feature gate ContainerCheckpoint is off.
    checkpoints: Option<PathBuf>,
    /// Metrics of sessions; `None` while the feature gate ExtendWebSocketsToKubelet is off.
    websockets: Option<Arc<Metrics>>,
}

impl Handles {
    /// Counts a WebSocket session that the agent terminates.
    fn count(&self, subresource: Subresource) {
        if let Some(metrics) = &self.websockets {
            metrics.http.websocket(subresource);
        }
    }
}

/// The router of streams and commands. `checkpoints` is the directory of checkpoints, absent while the feature gate
/// ContainerCheckpoint is off; `websockets` are the metrics of terminated WebSockets, absent while the feature gate
/// ExtendWebSocketsToKubelet is off.
pub fn router(containers: Containers, checkpoints: Option<PathBuf>, websockets: Option<Arc<Metrics>>) -> Router {
    let has_checkpoints = checkpoints.is_some();
    let of_container = |prefix: &str| {
        [
            format!("{prefix}/{{namespace}}/{{pod}}/{{container}}"),
            format!("{prefix}/{{namespace}}/{{pod}}/{{uid}}/{{container}}"),
        ]
    };
    let of_pod = ["/portForward/{namespace}/{pod}".to_owned(), "/portForward/{namespace}/{pod}/{uid}".to_owned()];
    let mut router = Router::new();
    router = routes(router, &of_container("/exec"), exec);
    router = routes(router, &of_container("/attach"), attach);
    router = routes(router, &of_container("/run"), run);
    router = routes(router, &of_pod, port_forward);
    if has_checkpoints {
        router = routes(router, &of_container("/checkpoint")[..1], checkpoint);
    }
    router.with_state(Handles { containers, checkpoints, websockets })
}

/// Routes all paths to one handler.
fn routes<T: 'static>(router: Router<Handles>, paths: &[String], handler: impl Handler<T, Handles>) -> Router<Handles> {
    paths.iter().fold(router, |router, path| router.route(path, any(handler.clone())))
}

/// The parameters of the path; those that a route does not have are empty.
#[derive(Default)]
struct Named {
    namespace: String,
    pod: String,
    uid: String,
    container: String,
}

impl Named {
    fn new(params: &RawPathParams) -> Self {
        let mut named = Self::default();
        for (name, value) in params {
            let part = match name {
                "namespace" => &mut named.namespace,
                "pod" => &mut named.pod,
                "uid" => &mut named.uid,
                _ => &mut named.container,
            };
            value.clone_into(part);
        }
        named
    }

    fn container(&self) -> (&str, &str, &str) {
        (&self.namespace, &self.pod, &self.container)
    }

    /// Whether the path has the UID of another pod.
    fn names_another(&self, pod: &crate::model::PodRef) -> bool {
        !self.uid.is_empty() && self.uid != pod.uid.as_str()
    }
}

async fn exec(State(handles): State<Handles>, params: RawPathParams, request: Request) -> Response {
    let (request, query) = answer::with_parameters(request).await;
    let found = exec_url(&handles.containers, &Named::new(&params), &query).await;
    stream(&handles, Subresource::Exec, found, request).await.unwrap_or_else(Response::from)
}

/// Proxies or translates the streams that the runtime serves at a URL.
async fn stream(
    handles: &Handles,
    subresource: Subresource,
    found: Result<(String, Streams), Refusal>,
    request: Request,
) -> Result<Response, Refusal> {
    let (url, streams) = found?;
    if handles.websockets.is_none() || !websocket::is_translated(request.headers()) {
        return Ok(proxy::proxy(&url, request).await);
    }
    handles.count(subresource);
    session::translated(&url, request, streams)
}

/// The URL of the streams, and which ones the runtime expects.
async fn exec_url(
    containers: &Containers,
    named: &Named,
    parameters: &answer::Parameters,
) -> Result<(String, Streams), Refusal> {
    let streams = Streams::parse(&parameters.all).map_err(Refusal::bad)?;
    let pod = containers.desired(&named.namespace, &named.pod)?;
    let id = containers.running(&pod, &named.container).await?;
    let id = id.ok_or_else(|| Refusal::internal(format!("container not found ({})", go_quoted(&named.container))))?;
    let Streams { stdin, stdout, stderr, tty } = streams;
    let cmd = params::command(&parameters.query);
    let request = cri::ExecRequest { container_id: id, cmd, tty, stdin, stdout, stderr };
    Ok((present(containers.runtime.exec(request).await?)?, streams))
}

async fn attach(State(handles): State<Handles>, params: RawPathParams, request: Request) -> Response {
    let (request, query) = answer::with_parameters(request).await;
    let found = attach_url(&handles.containers, &Named::new(&params), &query).await;
    stream(&handles, Subresource::Attach, found, request).await.unwrap_or_else(Response::from)
}

async fn attach_url(
    containers: &Containers,
    named: &Named,
    parameters: &answer::Parameters,
) -> Result<(String, Streams), Refusal> {
    let streams = Streams::parse(&parameters.all).map_err(Refusal::bad)?;
    let pod = containers.desired(&named.namespace, &named.pod)?;
    let identity = pod_ref(&pod);
    if named.names_another(&identity) {
        return Err(Refusal::internal(format!("pod {} not found", find::full_name(&identity))));
    }
    let name = &named.container;
    let missing = || Refusal::internal(format!("container {name} not found in pod {}", find::full_name(&identity)));
    let tty = find::terminal(&pod, name).ok_or_else(missing)?;
    let container_id = containers.running(&pod, name).await?.ok_or_else(missing)?;
    // The container's setting decides about a terminal; the runtime refuses stderr together with one.
    let streams = Streams { tty, stderr: streams.stderr && !tty, ..streams };
    let Streams { stdin, stdout, stderr, tty } = streams;
    let request = cri::AttachRequest { container_id, stdin, tty, stdout, stderr };
    Ok((present(containers.runtime.attach(request).await?)?, streams))
}

async fn port_forward(State(handles): State<Handles>, params: RawPathParams, request: Request) -> Response {
    let tunnelled = handles.websockets.as_ref().map(|_| websocket::tunnelled(request.headers())).unwrap_or_default();
    let ports = if tunnelled.is_empty() && params::asks_for_websocket(request.headers()) {
        params::ports(&answer::query_of(request.uri()))
    } else {
        Ok(Vec::new())
    };
    match port_forward_url(&handles.containers, &Named::new(&params), ports).await {
        Ok(url) if tunnelled.is_empty() => proxy::proxy(&url, request).await,
        Ok(url) => {
            handles.count(Subresource::PortForward);
            session::tunnelled(&url, request, &tunnelled).await.unwrap_or_else(Response::from)
        }
        Err(refusal) => refusal.into(),
    }
}

async fn port_forward_url(
    containers: &Containers,
    named: &Named,
    ports: Result<Vec<i32>, String>,
) -> Result<String, Refusal> {
    let ports = ports.map_err(Refusal::bad)?;
    let pod = containers.desired(&named.namespace, &named.pod)?;
    if named.names_another(&pod_ref(&pod)) {
        return Err(Refusal::not_found("pod not found"));
    }
    let sandbox = containers.sandbox(&pod).await?;
    present(containers.runtime.port_forward(&sandbox, ports).await?)
}

async fn run(State(handles): State<Handles>, params: RawPathParams, request: Request) -> Response {
    let query = answer::query_of(request.uri());
    let done = commands::run(&handles.containers, Named::new(&params).container(), &query).await;
    done.unwrap_or_else(Response::from)
}

async fn checkpoint(State(handles): State<Handles>, params: RawPathParams, request: Request) -> Response {
    let query = answer::query_of(request.uri());
    let folder = handles.checkpoints.unwrap_or_default();
    let done = commands::checkpoint(&handles.containers, &folder, Named::new(&params).container(), &query).await;
    done.unwrap_or_else(Response::from)
}

fn present(url: String) -> Result<String, Refusal> {
    if url.is_empty() { Err(Refusal::internal(BackendError::NoUrl.to_string())) } else { Ok(url) }
}
