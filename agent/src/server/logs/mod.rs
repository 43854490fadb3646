//! Logs over HTTP: `/containerLogs/...` of one container, `/logs/` of the node itself.
//!
//! Reads only; rotation and removal of logs belong to the workers and the runtime.
//!
//! ```text
//!  query ─▶ instance (which container) ─▶ runtime: log path ─▶ reader ─▶ filter ─▶ body ─▶ client
//!                                                   one inotify ─▶ watch ──▶ follow ─┘
//! ```

mod chunks;
mod filter;
mod follow;
mod instance;
pub mod node;
mod query;
mod reader;
mod shared;
mod successor;
mod tail;
#[cfg(test)]
mod tests;
mod watch;

use std::path::PathBuf;

use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::Uri;
use axum::response::Response;
use axum::routing::any;

use self::filter::Filter;
use self::filter::LineRules;
use self::follow::Follow;
use self::follow::Instance;
use self::follow::Reads;
use self::query::BadQuery;
use self::query::LogQuery;
use self::query::LogStreams;
use self::reader::Reader;
use self::shared::OpenLogs;
use self::watch::FolderWatch;
use super::answer;
use super::containers::Containers;
use super::containers::has_container;
use crate::model::Clock;
use crate::model::ContainerId;
use crate::model::Pod;
use crate::model::pod_ref;
use crate::model::quote::go_quoted;

#[derive(Clone)]
struct ContainerLogs {
    containers: Containers,
    split_streams: bool,
    watch: FolderWatch,
    open: OpenLogs,
    reads: Reads,
}

/// `/containerLogs/{namespace}/{pod}/{container}`. `split_streams` is the feature gate PodLogsQuerySplitStreams.
pub fn router(containers: Containers, split_streams: bool) -> Router {
    let (watch, open, reads) = (FolderWatch::default(), OpenLogs::default(), Reads::default());
    let logs = ContainerLogs { containers, split_streams, watch, open, reads };
    Router::new().route("/containerLogs/{namespace}/{pod}/{container}", any(serve)).with_state(logs)
}

async fn serve(
    State(logs): State<ContainerLogs>,
    Path((namespace, pod, container)): Path<(String, String, String)>,
    uri: Uri,
) -> Response {
    match logs.answer(&namespace, &pod, &container, &uri).await {
        Ok(response) => response,
        Err((status, text)) => answer::error(status, text),
    }
}

type Refusal = (StatusCode, String);

impl ContainerLogs {
    async fn answer(&self, namespace: &str, name: &str, container: &str, uri: &Uri) -> Result<Response, Refusal> {
        let query = query::parse(&answer::query_of(uri)).map_err(|bad| match bad {
            BadQuery::Undecodable => (StatusCode::BAD_REQUEST, r#"{"message": "Unable to decode query."}"#.to_owned()),
            BadQuery::Invalid => (StatusCode::UNPROCESSABLE_ENTITY, r#"{"message": "Invalid request."}"#.to_owned()),
        })?;
        let not_found = |text| (StatusCode::NOT_FOUND, text);
        let pod = self
            .containers
            .pods
            .pod(namespace, name)
            .ok_or_else(|| not_found(format!("pod {} does not exist", go_quoted(name))))?;
        if !has_container(&pod, container) {
            let text = format!("container {} not found in pod {}", go_quoted(container), go_quoted(name));
            return Err(not_found(text));
        }
        if let Some(stream @ (LogStreams::Stdout | LogStreams::Stderr)) = query.stream.filter(|_| !self.split_streams) {
            let text = format!(
                "unable to return the given log stream: {}. Please enable PodLogsQuerySplitStreams feature gate in kubelet",
                go_quoted(&format!("{stream:?}"))
            );
            return Err((StatusCode::BAD_REQUEST, text));
        }
        let status = self.containers.pods.status(&pod);
        let id = instance::log_instance(&status, name, container, query.previous)
            .map_err(|text| (StatusCode::BAD_REQUEST, text))?;
        match self.open(&pod, &id, &query).await {
            Ok(body) => Ok(Response::new(body)),
            // As upstream: with stdout the status was sent already, so the error becomes the body.
            Err(text) if query.stream != Some(LogStreams::Stderr) => Ok(Response::new(chunks::text(text))),
            Err(text) => Err((StatusCode::BAD_REQUEST, text)),
        }
    }

    /// Opens the log of one container as a response body.
    async fn open(&self, pod: &Pod, full_id: &str, query: &LogQuery) -> Result<Body, String> {
        let id = ContainerId::from(full_id.split_once("://").map_or(full_id, |(_, id)| id));
        let found = self.containers.runtime.container_status(id.as_str(), false).await.map_err(|error| {
            tracing::debug!(container = %id, %error, "cannot get the log path");
            format!("unable to retrieve container logs for {full_id}")
        })?;
        let path = PathBuf::from(found.status.log_path);
        let rules = LineRules {
            since: query.since.at(Clock::System.wall_nanos()),
            timestamps: query.timestamps,
            limit: query.limit,
            lines: query.tail.filter(|_| !query.follow),
            stream: query.stream.unwrap_or(LogStreams::All),
        };
        let instance = Instance { containers: self.containers.clone(), pod: pod_ref(pod).uid, id };
        if !query.follow {
            instance.until_written().await;
        }
        let (tail, filter) = (query.tail, Filter::new(rules));
        let open = self.open.clone();
        let opened = self.reads.run(move || Reader::open(&open, &path, tail, filter)).await;
        let reader = opened.ok_or("the agent is shutting down")?.map_err(|error| error.to_string())?;
        let follow = query.follow.then(|| Follow { changes: self.watch.follow(reader.folder()), instance });
        Ok(follow::body(reader, follow, self.reads.clone()))
    }
}
