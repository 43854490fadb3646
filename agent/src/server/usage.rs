//! `/stats/summary`, `/metrics/resource` and `/metrics/cadvisor`.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;
use axum::routing::any;

use super::answer;
use super::exposition;
use crate::metrics::Metrics;
use crate::metrics::append_text;
use crate::stats::Stats;

#[derive(Clone)]
struct Usage {
    stats: Stats,
    metrics: Arc<Metrics>,
}

/// The router of these paths.
pub fn router(stats: Stats, metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/stats/summary", any(summary))
        .route("/metrics/resource", any(resource))
        .route("/metrics/cadvisor", any(cadvisor))
        .with_state(Usage { stats, metrics })
}

async fn summary(State(usage): State<Usage>, request: Request) -> Response {
    let (_, parameters) = answer::with_parameters(request).await;
    let reduced: Vec<&str> = parameters
        .all
        .iter()
        .filter(|(name, _)| name == "only_cpu_and_memory")
        .map(|(_, value)| value.as_str())
        .collect();
    match usage.stats.summary(reduced == ["true"]).await {
        Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Err(error) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, format!("Internal Error: {error}")),
    }
}

async fn resource(State(usage): State<Usage>, request: Request) -> Response {
    let families = usage.stats.resource_metrics().await;
    exposition::strict(&usage.metrics, &request, families)
}

async fn cadvisor(State(usage): State<Usage>, request: Request) -> Response {
    let scrape = usage.stats.cadvisor_metrics().await;
    let metrics = usage.metrics.clone();
    let machine = tokio::task::spawn_blocking(move || metrics.gather_machine()).await;
    // The agent is shutting down.
    let machine = machine.unwrap_or_default();
    exposition::strict_encoded(&usage.metrics, &request, |protobuf| match protobuf {
        true => exposition::encoded(true, scrape.families().chain(machine)),
        false => {
            let mut text = scrape.text();
            append_text(&mut text, &machine).map(|()| text)
        }
    })
}
