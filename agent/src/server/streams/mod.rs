//! Interactive streams and commands: `/exec`, `/attach`, `/portForward`, `/run`, `/checkpoint`.
//!
//! Owns finding the container or sandbox, asking the runtime for a stream, and carrying its bytes. Refuses to take part
//! in what flows, and to know who the client is: that was settled before.
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
#[cfg(test)]
mod tests;

use std::path::PathBuf;

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
use super::answer::quote;
use super::containers::Containers;
use crate::model::pod_ref;

#[derive(Clone)]
struct Handles {
    containers: Containers,
    /// Where checkpoints go; `None` while the feature gate ContainerCheckpoint is off.
    checkpoints: Option<PathBuf>,
}

/// The paths of streams and commands. `checkpoints` is the folder for checkpoints, absent while the feature gate
/// ContainerCheckpoint is off.
pub fn router(containers: Containers, checkpoints: Option<PathBuf>) -> Router {
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
    router.with_state(Handles { containers, checkpoints })
}

/// The same handler for all paths.
fn routes<T: 'static>(router: Router<Handles>, paths: &[String], handler: impl Handler<T, Handles>) -> Router<Handles> {
    paths.iter().fold(router, |router, path| router.route(path, any(handler.clone())))
}

/// What the path names. Parts that the route does not have are empty.
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

    /// The UID of the path, if it has one, is not that of the pod.
    fn names_another(&self, pod: &crate::model::PodRef) -> bool {
        !self.uid.is_empty() && self.uid != pod.uid.as_str()
    }
}

async fn exec(State(handles): State<Handles>, params: RawPathParams, request: Request) -> Response {
    let (request, query) = answer::with_parameters(request).await;
    match exec_url(&handles.containers, &Named::new(&params), &query).await {
        Ok(url) => proxy::proxy(&url, request).await,
        Err(refusal) => refusal.into(),
    }
}

async fn exec_url(containers: &Containers, named: &Named, parameters: &answer::Parameters) -> Result<String, Refusal> {
    let streams = Streams::parse(&parameters.all).map_err(Refusal::bad)?;
    let pod = containers.desired(&named.namespace, &named.pod)?;
    let id = containers.running(&pod, &named.container).await?;
    let id = id.ok_or_else(|| Refusal::internal(format!("container not found ({})", quote(&named.container))))?;
    let Streams { stdin, stdout, stderr, tty } = streams;
    let cmd = params::command(&parameters.query);
    let request = cri::ExecRequest { container_id: id, cmd, tty, stdin, stdout, stderr };
    present(containers.runtime.exec(request).await?)
}

async fn attach(State(handles): State<Handles>, params: RawPathParams, request: Request) -> Response {
    let (request, query) = answer::with_parameters(request).await;
    match attach_url(&handles.containers, &Named::new(&params), &query).await {
        Ok(url) => proxy::proxy(&url, request).await,
        Err(refusal) => refusal.into(),
    }
}

async fn attach_url(
    containers: &Containers,
    named: &Named,
    parameters: &answer::Parameters,
) -> Result<String, Refusal> {
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
    let Streams { stdin, stdout, stderr, .. } = streams;
    // The runtime refuses a standard error beside a terminal.
    let request = cri::AttachRequest { container_id, stdin, tty, stdout, stderr: stderr && !tty };
    present(containers.runtime.attach(request).await?)
}

async fn port_forward(State(handles): State<Handles>, params: RawPathParams, request: Request) -> Response {
    let ports = if params::asks_for_websocket(request.headers()) {
        params::ports(&answer::query_of(request.uri()))
    } else {
        Ok(Vec::new())
    };
    match port_forward_url(&handles.containers, &Named::new(&params), ports).await {
        Ok(url) => proxy::proxy(&url, request).await,
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
