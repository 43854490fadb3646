//! `/stats/summary` and `/metrics/resource`.

use axum::Router;
use axum::extract::Request;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;
use axum::routing::any;

use super::answer;
use crate::metrics::TEXT_FORMAT;
use crate::stats::Stats;

/// The paths that tell usage.
pub fn router(stats: Stats) -> Router {
    Router::new().route("/stats/summary", any(summary)).route("/metrics/resource", any(resource)).with_state(stats)
}

async fn summary(State(stats): State<Stats>, request: Request) -> Response {
    let (_, parameters) = answer::with_parameters(request).await;
    let reduced: Vec<&str> = parameters
        .all
        .iter()
        .filter(|(name, _)| name == "only_cpu_and_memory")
        .map(|(_, value)| value.as_str())
        .collect();
    match stats.summary(reduced == ["true"]).await {
        Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Err(error) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, format!("Internal Error: {error}")),
    }
}

async fn resource(State(stats): State<Stats>) -> Response {
    let mut text = Vec::new();
    let families = stats.resource_metrics().await;
    match prometheus::Encoder::encode(&prometheus::TextEncoder::new(), &families, &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, TEXT_FORMAT)], text).into_response(),
        Err(error) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot encode the metrics: {error}")),
    }
}
