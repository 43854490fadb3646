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
use super::encoding::Turns;
use super::exposition;
use super::exposition::Accepted;
use crate::metrics::Metrics;
use crate::stats::Stats;

#[derive(Clone)]
struct Usage {
    stats: Stats,
    metrics: Arc<Metrics>,
    turns: Turns,
    /// Of `/metrics/cadvisor`: each holds megabytes of measurements from its first to its last step.
    scrapes: Turns,
}

/// The router of these paths.
pub fn router(stats: Stats, metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/stats/summary", any(summary))
        .route("/metrics/resource", any(resource))
        .route("/metrics/cadvisor", any(cadvisor))
        .with_state(Usage { stats, metrics, turns: Turns::default(), scrapes: Turns::default() })
}

async fn summary(State(usage): State<Usage>, request: Request) -> Response {
    let (_, parameters) = answer::with_parameters(request).await;
    let reduced: Vec<&str> = parameters
        .all
        .iter()
        .filter(|(name, _)| name == "only_cpu_and_memory")
        .map(|(_, value)| value.as_str())
        .collect();
    let measured = usage.stats.summary(reduced == ["true"]).await;
    let encode = move || match measured.and_then(|summary| summary.json()) {
        Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Err(error) => answer::error(StatusCode::INTERNAL_SERVER_ERROR, format!("Internal Error: {error}")),
    };
    usage.turns.encoded(encode).await
}

async fn resource(State(usage): State<Usage>, request: Request) -> Response {
    let accepted = Accepted::by(&request);
    let turn = usage.turns.next().await;
    let (families, metrics) = (usage.stats.resource_metrics().await, usage.metrics.clone());
    turn.encoded(move || exposition::strict(&metrics, accepted, families)).await
}

async fn cadvisor(State(usage): State<Usage>, request: Request) -> Response {
    let (accepted, metrics) = (Accepted::by(&request), usage.metrics.clone());
    let turn = usage.scrapes.next().await;
    let scrape = usage.stats.cadvisor_metrics().await;
    let encode = move || {
        let machine = metrics.gather_machine();
        exposition::strict_encoded(&metrics, accepted, |protobuf, page| {
            if protobuf {
                return exposition::encode(true, scrape.families().chain(machine), page);
            }
            scrape.write_text(page)?;
            exposition::encode(false, machine, page)
        })
    };
    turn.encoded(encode).await
}
