//! The health server: liveness (`/healthz`), runtime readiness (`/readyz`), and with `?verbose` the state of each sensor.
//!
//! The agent works without any sensor, so the state of a sensor does not change the status code.

use axum::Router;
use axum::extract::Query;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use axum::routing::any;

use super::Handles;
use super::SensorReport;
use super::checks::Check;
use super::checks::HealthQuery;
use super::checks::overall;
use super::checks::single;

/// Passes whenever the server answers.
fn ping() -> Check {
    Check { name: "ping", outcome: Ok(()) }
}

pub(super) fn router(handles: Handles) -> Router {
    Router::new()
        .route("/healthz", any(healthz))
        .route("/readyz", any(readyz))
        .route("/healthz/ping", any(async || text(single(&ping()))))
        .fallback(not_found)
        .with_state(handles)
}

async fn healthz(State(handles): State<Handles>, Query(query): Query<Vec<(String, String)>>) -> Response {
    let wanted = HealthQuery::new(&query);
    let sensors = if wanted.verbose { handles.agent.sensors().iter().map(line).collect() } else { Vec::new() };
    text(overall(&[ping()], &wanted, &sensors))
}

async fn readyz(State(handles): State<Handles>, Query(query): Query<Vec<(String, String)>>) -> Response {
    let runtime = Check { name: "runtime", outcome: handles.agent.runtime_ready() };
    text(overall(&[ping(), runtime], &HealthQuery::new(&query), &[]))
}

/// A sensor's state in one line. Without the mark of a check: Datadog's agent counts every line with another mark than `[+]`
/// as a failed check, and the kubelet as unhealthy.
pub(super) fn line(report: &SensorReport) -> String {
    let reason = report.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
    format!("sensor {} {}{reason}", report.sensor, report.state)
}

/// Plain text, protected from content sniffing.
pub(super) fn text((status, body): (StatusCode, String)) -> Response {
    let headers = [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    (status, headers, body).into_response()
}

/// The response to unknown paths.
pub(super) async fn not_found() -> Response {
    text((StatusCode::NOT_FOUND, "404 page not found\n".to_owned()))
}
