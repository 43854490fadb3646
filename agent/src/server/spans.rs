//! A span around every request that has a route.

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument as _;

use crate::telemetry;

/// Makes the span. A server that knows who asks trusts its clients: then the span continues the client's trace.
pub(super) async fn spanned(State(trusts_clients): State<bool>, request: Request, next: Next) -> Response {
    let Some(route) = request.extensions().get::<MatchedPath>().cloned() else { return next.run(request).await };
    let span = telemetry::request(request.method(), route.as_str(), request.headers(), trusts_clients);
    let answer = next.run(request).instrument(span.clone()).await;
    telemetry::answered(&span, answer.status());
    answer
}
