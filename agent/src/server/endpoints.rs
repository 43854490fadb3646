//! Endpoints that the server implements itself: health, pods, metrics, configuration. The same for both ports.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts as _;
use axum::extract::Query;
use axum::extract::Request;
use axum::http::Method;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use prometheus::proto::MetricFamily;

use super::Handles;
use super::answer;
use super::checks::Check;
use super::checks::HealthQuery;
use super::checks::overall;
use super::checks::single;
use super::debug;
use super::encoding::Turns;
use super::exposition;
use super::exposition::Accepted;
use super::health::line;
use super::health::not_found;
use super::health::text;
use super::paths::Endpoint;
use super::pod_list;
use super::zpages;
use crate::metrics::Metrics;

/// Responds from what the handles read.
#[derive(Clone)]
pub(super) struct Endpoints {
    handles: Handles,
    sync_loop_limit: Duration,
    own_paths: Vec<String>,
    /// For lists of pods and metrics.
    turns: Turns,
}

impl Endpoints {
    /// `own_paths` are listed on `/statusz`.
    pub(super) fn new(handles: Handles, sync_loop_limit: Duration, own_paths: Vec<String>) -> Self {
        Self { handles, sync_loop_limit, own_paths, turns: Turns::default() }
    }

    pub(super) fn metrics(&self) -> Arc<Metrics> {
        self.handles.metrics.clone()
    }

    /// The response of `endpoint`; `decoded` is the path.
    pub(super) async fn answer(&self, endpoint: Endpoint, decoded: &str, request: Request) -> Response {
        let accepted = Accepted::by(&request);
        match endpoint {
            Endpoint::Healthz => self.healthz(request).await,
            Endpoint::Check(name) => self.check(name),
            Endpoint::Pods => {
                let agent = self.handles.agent.clone();
                self.turns.encoded(move || pod_list::answer(agent.pods())).await
            }
            Endpoint::RunningPods => {
                let agent = self.handles.agent.clone();
                let encode = move || match agent.running_pods() {
                    Ok(pods) => pod_list::answer(pods),
                    Err(error) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, error),
                };
                self.turns.encoded(encode).await
            }
            Endpoint::Metrics => {
                self.handles.agent.refresh_metrics().await;
                self.exposed(accepted, Metrics::gather).await
            }
            Endpoint::ProbeMetrics => self.exposed(accepted, Metrics::gather_probes).await,
            Endpoint::SliMetrics => self.slis(&request),
            Endpoint::Configz => self.configz(),
            Endpoint::Flagz => zpages::flagz(&self.handles.flags, request.headers()),
            Endpoint::Statusz => {
                zpages::statusz(&self.handles.metrics, self.handles.version, &self.own_paths, request.headers())
            }
            Endpoint::DebugFlags => debug::verbosity(|level| self.handles.agent.set_verbosity(level), request).await,
            Endpoint::Profile => debug::profile(decoded).await,
            // The dispatcher passes these to mounted routers.
            Endpoint::Debug | Endpoint::Stats => not_found().await,
        }
    }

    /// Families in the format that the client accepts.
    async fn exposed(&self, accepted: Accepted, gather: fn(&Metrics) -> Vec<MetricFamily>) -> Response {
        let metrics = self.metrics();
        self.turns.encoded(move || exposition::strict(&metrics, accepted, gather(&metrics))).await
    }

    fn checks(&self) -> [Check; 4] {
        let stuck = self.handles.agent.sync_loop_age().is_some_and(|age| age > self.sync_loop_limit);
        let sync_loop = if stuck { Err("sync Loop took longer than expected".to_owned()) } else { Ok(()) };
        [
            Check { name: "ping", outcome: Ok(()) },
            // Lines are written synchronously: there is no flusher that could be stuck.
            Check { name: "log", outcome: Ok(()) },
            Check { name: "syncloop", outcome: sync_loop },
            // There is no device plugin registration server yet.
            Check { name: "device-plugin", outcome: Ok(()) },
        ]
    }

    async fn healthz(&self, request: Request) -> Response {
        let (mut parts, _) = request.into_parts();
        let query = Query::<Vec<(String, String)>>::from_request_parts(&mut parts, &()).await;
        let wanted = HealthQuery::new(&query.map(|query| query.0).unwrap_or_default());
        let checks = self.checks();
        for check in checks.iter().filter(|check| !wanted.excludes(check)) {
            self.handles.metrics.slis.checked(check.name, check.outcome.is_ok());
        }
        let sensors = if wanted.verbose { self.handles.agent.sensors().iter().map(line).collect() } else { Vec::new() };
        text(overall(&checks, &wanted, &sensors))
    }

    fn check(&self, name: &str) -> Response {
        match self.checks().iter().find(|check| check.name == name) {
            Some(check) => text(single(check)),
            None => text((StatusCode::NOT_FOUND, "404 page not found\n".to_owned())),
        }
    }

    fn slis(&self, request: &Request) -> Response {
        if request.method() == Method::DELETE {
            self.handles.metrics.slis.reset();
            return text((StatusCode::OK, "metrics reset\n".to_owned()));
        }
        exposition::strict(&self.handles.metrics, Accepted::by(request), self.handles.metrics.slis.gather())
    }

    fn configz(&self) -> Response {
        let headers = [(header::CONTENT_TYPE, "application/json"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
        (headers, self.handles.configz.text()).into_response()
    }
}
