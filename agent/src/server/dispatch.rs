//! Dispatches the requests of the main and the read-only port.
//!
//! ```text
//!  metrics ─▶ path known? ─▶ guard (main port) ─▶ method? type? ─▶ endpoint, or a mounted router
//! ```

use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::task::Poll;

use axum::body::Body;
use axum::body::Bytes;
use axum::body::HttpBody;
use axum::extract::Request;
use axum::http::Method;
use axum::http::StatusCode;
use axum::http::Uri;
use axum::http::header;
use axum::http::uri::PathAndQuery;
use axum::response::IntoResponse;
use axum::response::Response;
use hyper::body::Frame;
use hyper::body::SizeHint;
use tokio::time::Instant;
use tower::ServiceExt as _;
use tracing::Instrument as _;

use super::Mounted;
use super::endpoints::Endpoints;
use super::health::not_found;
use super::health::text;
use super::paths::Endpoint;
use super::paths::Found;
use super::paths::Handler;
use super::paths::RouteError;
use super::paths::Table;
use super::paths::choose;
use super::paths::labels;
use super::secure::Guard;
use super::secure::Peer;
use crate::metrics;
use crate::metrics::Metrics;
use crate::telemetry;

/// Dispatches the requests of one port.
pub(super) struct Dispatcher {
    table: Table,
    /// `None`: every request is admitted.
    guard: Option<Guard>,
    endpoints: Endpoints,
    mounted: Mounted,
    metrics: Arc<Metrics>,
}

impl Dispatcher {
    pub(super) fn new(table: Table, guard: Option<Guard>, endpoints: Endpoints, mounted: &Mounted) -> Self {
        let metrics = endpoints.metrics();
        let known = |router: &axum::Router| router.clone().fallback(async || no_route());
        let mounted = Mounted { debug: known(&mounted.debug), stats: known(&mounted.stats) };
        Self { table, guard, endpoints, mounted, metrics }
    }

    /// Responds to a request.
    pub(super) async fn answer(&self, mut request: Request) -> Response {
        let path = request.uri().path().to_owned();
        let labels = labels(&self.table, request.method().as_str(), &path);
        let peer = request.extensions().get::<Peer>().cloned().unwrap_or_default();
        let family = labels.path;
        let in_flight = InFlight::begin(self.metrics.clone(), labels, peer);
        request.extensions_mut().insert(in_flight.clone());
        let (method, since) = (request.method().clone(), Instant::now());
        let response = self.authorize_and_serve(request, &path, family).await;
        let (status, took) = (response.status().as_u16(), since.elapsed());
        tracing::debug!(%method, path, status, ?took, peer = ?in_flight.0.peer.address, "request");
        response.map(|body| Body::new(TrackedBody { body, _in_flight: in_flight }))
    }

    /// Only admitted requests get a span. Authenticated clients may make it part of their own trace.
    async fn authorize_and_serve(&self, mut request: Request, path: &str, family: &str) -> Response {
        match self.table.find(path) {
            Found::Malformed => text((StatusCode::BAD_REQUEST, "400 Bad Request".to_owned())),
            Found::Unknown => not_found().await,
            Found::Redirect(to) => redirect(&request, &to),
            Found::Handled(handler, decoded) => {
                if let Some(guard) = &self.guard
                    && let Err(answer) = guard.admit(&mut request, &decoded).await
                {
                    return *answer;
                }
                let route = format!("/{family}");
                let span = telemetry::request(request.method(), &route, request.headers(), self.guard.is_some());
                let response = self.serve(handler, &decoded, request).instrument(span.clone()).await;
                telemetry::answered(&span, response.status());
                response
            }
        }
    }

    async fn serve(&self, handler: Handler, decoded: &str, mut request: Request) -> Response {
        let routes = match handler {
            Handler::Refused(why) => return text((StatusCode::METHOD_NOT_ALLOWED, format!("{why}\n"))),
            Handler::Any(answer) => return self.respond(answer, decoded, request).await,
            Handler::Routes(routes) => routes,
        };
        let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
        match choose(routes, decoded, request.method().as_str(), accept) {
            Ok((answer, path)) => {
                rewrite(request.uri_mut(), &path);
                self.respond(answer, decoded, request).await
            }
            Err(error) => route_error(error),
        }
    }

    async fn respond(&self, answer: Endpoint, decoded: &str, request: Request) -> Response {
        let router = match answer {
            Endpoint::Debug => &self.mounted.debug,
            Endpoint::Stats => &self.mounted.stats,
            _ => return self.endpoints.answer(answer, decoded, request).await,
        };
        let Ok(response) = router.clone().oneshot(request).await;
        response
    }
}

/// Replaces the path of a request by its canonical form; the query stays.
fn rewrite(uri: &mut Uri, path: &str) {
    let text = match uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    // An encoded path is always valid; if it were not, the client's path would stay.
    if let Ok(path_and_query) = text.parse::<PathAndQuery>() {
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = Some(path_and_query);
        if let Ok(rewritten) = Uri::from_parts(parts) {
            *uri = rewritten;
        }
    }
}

fn redirect(request: &Request, path: &str) -> Response {
    let location = match request.uri().query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let status = StatusCode::TEMPORARY_REDIRECT;
    if request.method() != Method::GET {
        return (status, [(header::LOCATION, location)]).into_response();
    }
    let escaped = location.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&#34;");
    let body = format!("<a href=\"{escaped}\">Temporary Redirect</a>.\n\n");
    (status, [(header::LOCATION, location), (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned())], body)
        .into_response()
}

fn no_route() -> Response {
    (StatusCode::NOT_FOUND, "404: Page Not Found").into_response()
}

fn route_error(error: RouteError) -> Response {
    match error {
        RouteError::NotFound => no_route(),
        RouteError::Method { allow } => {
            (StatusCode::METHOD_NOT_ALLOWED, [(header::ALLOW, allow)], "405: Method Not Allowed").into_response()
        }
        RouteError::Type { types } => {
            let body = format!("406: Not Acceptable\n\nAvailable representations: {types}");
            (StatusCode::NOT_ACCEPTABLE, body).into_response()
        }
    }
}

/// A request in progress. Each request carries one as an extension; a handler that goes on after the head of the
/// response, as with an upgraded connection, keeps it until it is done.
#[derive(Clone, Debug)]
pub struct InFlight(Arc<Tracked>);

#[derive(Debug)]
struct Tracked {
    metrics: Arc<Metrics>,
    labels: metrics::Request,
    since: Instant,
    /// Keeps the connection's slot, too.
    peer: Peer,
}

impl InFlight {
    fn begin(metrics: Arc<Metrics>, labels: metrics::Request, peer: Peer) -> Self {
        metrics.http.began(&labels);
        Self(Arc::new(Tracked { metrics, labels, since: Instant::now(), peer }))
    }
}

/// Counts the end of the request, also when the client disconnects before the response.
impl Drop for Tracked {
    fn drop(&mut self) {
        self.metrics.http.ended(&self.labels, self.since.elapsed());
    }
}

/// A body that keeps its request in progress until it was sent.
struct TrackedBody {
    body: Body,
    _in_flight: InFlight,
}

impl HttpBody for TrackedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
